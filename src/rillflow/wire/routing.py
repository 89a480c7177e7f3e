"""Finds the handler of a path and a method: one dictionary look-up per segment, whatever the number of routes.

A segment `{name}` matches anything, `{name:int}` digits only; a literal segment wins over both. A `Gate` bounds the
concurrent requests of a route; those past it get a 429. `Common` has the routes of every service.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rillflow.errors import QueueFull, WireError
from rillflow.types.routes import JSON, TEXT, get, raw

Found = TypeVar("Found")

_DIGITS = 18  # of a `{name:int}`
_SHOWN = 200  # characters of a path that an error repeats


class NotFound(WireError):
    status = 404


class WrongMethod(WireError):
    status = 405

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message, f"use {' or '.join(allowed)}")
        self.allowed = allowed


@dataclass(slots=True)
class _Place(Generic[Found]):
    """A node of the tree of path segments."""

    places: dict[str, _Place[Found]] = field(default_factory=dict)
    anything: _Place[Found] | None = None
    name: str = ""
    digits: bool = False
    methods: dict[str, Found] = field(default_factory=dict)

    def below(self, segment: str) -> _Place[Found]:
        """Return the child for a segment of a route, and make it if it is missing."""
        if not segment.startswith("{"):
            return self.places.setdefault(segment, _Place())
        name, _, kind = segment.strip("{}").partition(":")
        if self.anything is None:
            self.anything = _Place(name=name, digits=kind == "int")
        assert (self.anything.name, self.anything.digits) == (name, kind == "int"), "two names for one segment"
        return self.anything

    def takes(self, segment: str) -> bool:
        return not self.digits or (segment.isdecimal() and len(segment) <= _DIGITS)

    def step(self, segment: str) -> _Place[Found] | None:
        found = self.places.get(segment)
        if found is None and self.anything is not None and self.anything.takes(segment):
            return self.anything
        return found


class Routing(Generic[Found]):
    """The handlers of one service by path and method."""

    def __init__(self) -> None:
        self._root: _Place[Found] = _Place()

    def add(self, method: str, path: str, found: Found) -> None:
        place = self._root
        for segment in path.split("/")[1:]:
            place = place.below(segment)
        assert method not in place.methods, f"{method} {path} is there twice"
        place.methods[method] = found

    def find(self, path: str, method: str) -> tuple[Found, dict[str, str]]:
        """Return the handler of the path and the values of its open segments; raises NotFound or WrongMethod."""
        place, taken = self._root, dict[str, str]()
        for segment in path.split("/")[1:]:
            after = place.step(segment)
            if after is None:
                raise NotFound(f"there is no {path[:_SHOWN]}", "look at the documentation for the routes")
            if after.name:
                taken[after.name] = segment
            place = after
        found = place.methods.get("GET" if method == "HEAD" else method)
        if found is not None:
            return found, taken
        if not place.methods:
            raise NotFound(f"there is no {path[:_SHOWN]}", "look at the documentation for the routes")
        raise WrongMethod(f"{path} does not answer {method}", sorted(place.methods))

    def __iter__(self) -> Iterator[Found]:
        places = [self._root]
        while places:
            place = places.pop()
            yield from place.methods.values()
            places += [*place.places.values(), *([] if place.anything is None else [place.anything])]


class Gate:
    """Lets `most` in. Each that was let in leaves exactly once."""

    def __init__(self, most: int, what: str) -> None:
        self.most = most
        self.at_work = 0
        self._what = what

    def enter(self) -> bool:
        if self.at_work >= self.most:
            return False
        self.at_work += 1
        return True

    def leave(self) -> None:
        self.at_work -= 1

    def refusal(self) -> QueueFull:
        return QueueFull(f"{self.most} {self._what} are at work", "come back when some have ended")


DESCRIPTION = "/openapi.json"


class Common:
    """Routes that only read, open to readers."""

    health = get("/health", dict[str, str], "reader", summary="Whether the service is there")
    metrics = raw("GET", "/metrics", "reader", summary="Prometheus metrics", answers={TEXT: ()})
    description = raw("GET", DESCRIPTION, "reader", summary="This description", answers={JSON: ()})
