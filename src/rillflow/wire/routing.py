"""The routes of a service: the handler of a path and a method, and the OpenAPI description made from the declarations.

A handler is found by one dictionary look-up per segment, whatever the number of routes. A segment `{name}` matches
anything, `{name:int}` digits only; a literal segment wins over both. A `Gate` bounds the concurrent requests of a
route; those past it get a 429. `Common` has the routes of every service.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from rillflow import __version__
from rillflow.errors import ErrorBody, QueueFull, WireError
from rillflow.types.routes import JSON, MSGPACK, TEXT, Route, get, raw

Found = TypeVar("Found")

_DIGITS = 18  # of a `{name:int}`
_SHOWN = 200  # characters of a path that an error repeats
STATUSES = {
    400: "The request is wrong, does not fit into the model's context, or passes a limit of the run.",
    401: "No key, or one that does not open this route.",
    403: "The token has another scope than this route needs, or the recipe does not let this key do so.",
    404: "No such session (it may have been closed), model, file or route.",
    408: "The body did not come in time.",
    409: "What the call names is no longer the caller's.",
    410: "The run has ended.",
    413: "The body is larger than the run allows.",
    429: "A bound on calls at work is reached: come back after `Retry-After` seconds.",
    500: "The service or the engine failed.",
    503: "The service or the engine is going away: come back after `Retry-After` seconds.",
    504: "A deadline has passed.",
    507: "The disk is full: nothing of the call is kept.",
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token of the run, or a session's key."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, as Anthropic's clients."},
}


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

    def open(self, segment: str) -> _Place[Found] | None:
        """Return the open child if it takes the segment."""
        return self.anything if self.anything is not None and self.anything.takes(segment) else None


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
            after = place.places.get(segment) or place.open(segment)
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


# ------------------------------------------------------------ the OpenAPI description


def describe(name: str, routes: Iterable[Route[Any, Any]]) -> dict[str, Any]:
    """Return the served routes as an OpenAPI 3.1 document."""
    routes = list(routes)
    types = list(dict.fromkeys(kind for route in routes for kind in _types(route)))
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _described(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Rillflow {name}", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
        "security": [{scheme: []} for scheme in _SCHEMES],
    }


def _path(route: Route[Any, Any]) -> str:
    return re.sub(r"{(\w+):int}", r"{\1}", route.path)


def _errors(route: Route[Any, Any]) -> tuple[type, ...]:
    return route.errors or (ErrorBody,)


def _types(route: Route[Any, Any]) -> list[Any]:
    answers = [kind for kinds in route.answers.values() for kind in kinds]
    return [*([route.body] if route.has_body else []), *answers, *_errors(route)]


def _described(route: Route[Any, Any], schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    answers = {content: {"schema": _one_of(kinds, schemas)} for content, kinds in route.answers.items()}
    errors = {JSON if route.errors else MSGPACK: {"schema": _one_of(_errors(route), schemas)}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answers}}
    if route.optional:
        responses["204"] = {"description": "There is none now."}
    for status, meaning in STATUSES.items():
        responses[str(status)] = {"description": meaning, "content": errors}
        if status in (429, 503):
            responses[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    described: dict[str, Any] = {
        "summary": route.summary,
        "parameters": [*_parameters(route)],
        "responses": responses,
        "x-rillflow-scopes": list(route.scopes),
    }
    if route.has_body:
        described["requestBody"] = {"required": True, "content": {route.content: {"schema": schemas[route.body]}}}
    return described


def _one_of(kinds: tuple[type, ...], schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    return {"anyOf": [schemas[kind] for kind in kinds]} if kinds else {}


def _parameters(route: Route[Any, Any]) -> Iterator[dict[str, Any]]:
    for name, kind in re.findall(r"{(\w+)(:int)?}", route.path):
        schema = {"type": "integer", "minimum": 0} if kind else {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for place, names in (("header", route.headers), ("query", route.query)):
        for name in names:
            yield {"name": name, "in": place, "required": False, "schema": {"type": "string"}}
