"""The OpenAPI description of a service, made from the declarations of its routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from rillflow import __version__
from rillflow.errors import ErrorBody
from rillflow.types.routes import JSON, MSGPACK, Route

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
