"""Routes by path and method: one dictionary look-up for each segment, whatever the number of routes.

Every route names the scopes of tokens that open it, so that none is open by default. A segment `{name}` takes anything,
`{name:int}` digits only; a segment spelled out wins over both. What `{name}` took lies in the request's `path_params`,
where Starlette's `Request` looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from rillflow.errors import WireError
from rillflow.types import TokenScope

_DIGITS = 18  # of a `{name:int}`
_SHOWN = 200  # characters of a path that an error repeats


class NotFound(WireError):
    status = 404


class WrongMethod(WireError):
    status = 405

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message, f"use {' or '.join(allowed)}")
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of a service's route table.

    A token of one of the `scopes` opens it. `body` is the type of its body, None for none or for one that it reads by
    itself. A route that `waits` for news ends when its client disconnects.
    """

    method: str
    path: str
    scopes: tuple[TokenScope, ...]
    app: ASGIApp = field(repr=False)
    body: type | None = None
    waits: bool = False


@dataclass(slots=True)
class _Place:
    """Where the segments so far have led."""

    places: dict[str, _Place] = field(default_factory=dict)
    anything: _Place | None = None
    name: str = ""
    digits: bool = False
    methods: dict[str, Route] = field(default_factory=dict)

    def below(self, segment: str) -> _Place:
        """The place for a segment of a route, made where there is none yet."""
        if not segment.startswith("{"):
            return self.places.setdefault(segment, _Place())
        name, _, kind = segment.strip("{}").partition(":")
        if self.anything is None:
            self.anything = _Place(name=name, digits=kind == "int")
        assert (self.anything.name, self.anything.digits) == (name, kind == "int"), "two names for one segment"
        return self.anything

    def takes(self, segment: str) -> bool:
        return not self.digits or (segment.isdecimal() and len(segment) <= _DIGITS)

    def step(self, segment: str) -> _Place | None:
        found = self.places.get(segment)
        if found is None and self.anything is not None and self.anything.takes(segment):
            return self.anything
        return found


class Routes:
    """The routes of one service."""

    def __init__(self) -> None:
        self._root = _Place()

    def add(self, route: Route) -> None:
        assert route.scopes, f"{route.path} names no scope that opens it"
        place = self._root
        for segment in route.path.split("/")[1:]:
            place = place.below(segment)
        assert route.method not in place.methods, f"{route.method} {route.path} is there twice"
        place.methods[route.method] = route

    def find(self, path: str, method: str) -> tuple[Route, dict[str, str]]:
        """The route, and what the path's open segments took; NotFound or WrongMethod where there is none."""
        place, taken = self._root, dict[str, str]()
        for segment in path.split("/")[1:]:
            after = place.step(segment)
            if after is None:
                raise NotFound(f"there is no {path[:_SHOWN]}", "look at the documentation for the routes")
            if after.name:
                taken[after.name] = segment
            place = after
        route = place.methods.get("GET" if method == "HEAD" else method)
        if route is not None:
            return route, taken
        if not place.methods:
            raise NotFound(f"there is no {path[:_SHOWN]}", "look at the documentation for the routes")
        raise WrongMethod(f"{path} does not answer {method}", sorted(place.methods))

    def __iter__(self) -> Iterator[Route]:
        places = [self._root]
        while places:
            place = places.pop()
            yield from place.methods.values()
            places += [*place.places.values(), *([] if place.anything is None else [place.anything])]
