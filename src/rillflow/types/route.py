"""A route, declared once: server, client, OpenAPI page, docs and tests are made from the declaration.

Every service has a table of routes: a class whose attributes are `Route`s, named as in its clients. A table lives
beside the types that it names, in the first package that both the service and its callers may import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rillflow.types.base import TokenScope

Body = TypeVar("Body")
Reply = TypeVar("Reply")

MSGPACK, JSON, TEXT, BYTES = "application/msgpack", "application/json", "text/plain", "application/octet-stream"


@dataclass(frozen=True, eq=False, slots=True)
class Route(Generic[Body, Reply]):
    """One route.

    A token of one of the `scopes` opens it. `again` says why a second copy of a body does no harm; it is empty if the
    body has an attempt id, which its receiver takes once, and if the route has no body. A route that `waits` ends when
    its client disconnects. `answers` has the possible types by content type; no types mean opaque content.
    """

    method: str
    path: str
    scopes: tuple[TokenScope, ...]
    summary: str
    body: type[Body]
    reply: type[Reply]
    again: str = ""
    waits: bool = False
    content: str = MSGPACK  # of the body
    answers: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    errors: tuple[type, ...] = ()
    headers: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    optional: bool = False  # the answer may be empty (204)

    @property
    def has_body(self) -> bool:
        return self.body is not type(None)


def post(
    path: str, body: type[Body], reply: type[Reply], *scopes: TokenScope, summary: str, again: str = ""
) -> Route[Body, Reply]:
    """Declare a call with a msgpack body in both directions. It waits if its body has a field `wait`."""
    waits = "wait" in getattr(body, "__struct_fields__", ())
    return Route("POST", path, scopes, summary, body, reply, again, waits, answers=_answers(MSGPACK, reply))


def get(path: str, reply: type[Reply], *scopes: TokenScope, summary: str) -> Route[None, Reply]:
    """Declare a call that only reads, answered in msgpack."""
    return Route("GET", path, scopes, summary, type(None), reply, answers=_answers(MSGPACK, reply))


def raw(
    method: str,
    path: str,
    *scopes: TokenScope,
    summary: str,
    body: type | None = None,
    again: str = "",
    waits: bool = False,
    content: str = JSON,
    answers: Mapping[str, tuple[type, ...]],
    errors: tuple[type, ...] = (),
    headers: tuple[str, ...] = (),
    query: tuple[str, ...] = (),
    optional: bool = False,
) -> Route[Any, Any]:
    """Declare a route whose handler reads the raw request and returns a response."""
    kind: Any = type(None) if body is None else body
    return Route(
        method, path, scopes, summary, kind, object, again, waits, content, answers, errors, headers, query, optional
    )


def routes_of(table: type) -> list[Route[Any, Any]]:
    """Return the routes of a table in the order of their declaration. An attribute may be a dictionary of routes."""
    values = [value for name, value in vars(table).items() if not name.startswith("_")]
    found = [one for value in values for one in (value.values() if isinstance(value, dict) else [value])]
    return [one for one in found if isinstance(one, Route)]


def _answers(content: str, reply: Any) -> dict[str, tuple[type, ...]]:
    return {content: (reply,)}
