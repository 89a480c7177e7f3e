"""The OpenAPI description of the routes, made from the types that requests are decoded into and answers must have.

Every route of a gateway has an `Operation` here; a test compares the two. The two forms of a session's route, by path
and by key, share one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

import msgspec

from rillflow import __version__
from rillflow.errors import ErrorBody
from rillflow.gateway import shapes
from rillflow.gateway.dialects import chat, completions, messages, responses
from rillflow.gateway.sampling.control import Interrupt, Resume

JSON, EVENTS, MSGPACK, TEXT = "application/json", "text/event-stream", "application/msgpack", "text/plain"

SESSION = "/s/{session}"
Route = tuple[str, str]  # method and path

STATUSES = {
    400: "The request is wrong, does not fit into the model's context, or passes a limit of the run.",
    401: "No key, or one that does not open this route.",
    403: "The recipe does not let this key give rewards, or the token has another scope than this route needs.",
    404: "No such session (it may have been closed), model or route.",
    408: "The body did not come in time.",
    409: "The session is not the caller's to end.",
    410: "The run has ended.",
    413: "The body is larger than the run allows.",
    429: "A bound on calls at work is reached: come back after `Retry-After` seconds.",
    500: "The engine failed.",
    503: "The engine is going away: come back after `Retry-After` seconds.",
    504: "The session's deadline has passed.",
    507: "The disk is full: nothing of the call is kept.",
}


class Operation(NamedTuple):
    """What one route does. `answers` has the possible types for each type of content; none where it is opaque."""

    summary: str
    answers: Mapping[str, tuple[type, ...]]
    body: type | None = None
    errors: tuple[type, ...] = (shapes.ErrorAnswer,)
    headers: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    optional: bool = False  # the answer: 204 where there is none


def _asking(summary: str, dialect: Any, answer: type) -> Operation:
    error = shapes.AnthropicErrorAnswer if dialect is messages else shapes.ErrorAnswer
    return Operation(summary, {JSON: (answer,), EVENTS: ()}, get_type_hints(dialect.decode)["return"], (error,))


_EITHER = (shapes.ErrorAnswer, shapes.AnthropicErrorAnswer)
_VERSION = ("anthropic-version",)

OPERATIONS: dict[Route, Operation] = {
    ("POST", chat.PATH): _asking("OpenAI chat completions", chat, shapes.ChatAnswer),
    ("POST", completions.PATH): _asking("OpenAI completions", completions, shapes.CompletionAnswer),
    ("POST", responses.PATH): _asking("OpenAI responses", responses, shapes.ResponsesAnswer),
    ("POST", responses.COUNT_PATH): Operation(
        "How many tokens the prompt of a response has",
        {JSON: (shapes.ResponsesCount,)},
        responses.ResponsesRequest,
    ),
    ("GET", f"{responses.PATH}/{{response}}"): Operation(
        "A response of this session", {JSON: (shapes.ResponsesAnswer,)}
    ),
    ("POST", messages.PATH): _asking("Anthropic messages", messages, shapes.MessagesAnswer),
    ("POST", messages.COUNT_PATH): Operation(
        "How many tokens the prompt of a message has",
        {JSON: (shapes.CountAnswer,)},
        messages.CountRequest,
        (shapes.AnthropicErrorAnswer,),
    ),
    ("GET", "/v1/models"): Operation(
        "The policies, as models", {JSON: (shapes.Models, shapes.AnthropicModels)}, None, _EITHER, _VERSION
    ),
    ("GET", "/v1/models/{model}"): Operation(
        "One policy, as a model", {JSON: (shapes.Model, shapes.AnthropicModel)}, None, _EITHER, _VERSION
    ),
    ("GET", "/engines"): Operation("Which engines sample, and which are held", {JSON: ()}),
    ("POST", "/engines/interrupt"): Operation("Hold engines, or move what they do", {JSON: ()}, Interrupt),
    ("POST", "/engines/resume"): Operation("Take back a reason to hold engines", {JSON: ()}, Resume),
    ("GET", "/openapi.json"): Operation("This description", {JSON: ()}, None, _EITHER),
    ("GET", "/health"): Operation("Whether the service is there", {MSGPACK: ()}, None, (ErrorBody,)),
    ("GET", "/metrics"): Operation("Prometheus metrics", {TEXT: ()}, None, (ErrorBody,)),
}


def find(operations: Mapping[Route, Operation], method: str, path: str) -> Operation | None:
    return operations.get((method, path)) or operations.get((method, path.removeprefix(SESSION)))


def description(operations: Mapping[Route, Operation], routes: Iterable[Route]) -> dict[str, Any]:
    """What is served, as an OpenAPI 3.1 document."""
    types = list(dict.fromkeys(kind for operation in operations.values() for kind in _types(operation)))
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        operation = find(operations, method, path)
        if operation is not None:
            paths.setdefault(path, {})[method.lower()] = _described(operation, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rillflow gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
        "security": [{name: []} for name in _SCHEMES],
    }


_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A session's key, or a token of the run."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, as Anthropic's clients."},
}


def _types(operation: Operation) -> list[type]:
    answers = [kind for kinds in operation.answers.values() for kind in kinds]
    return [*([] if operation.body is None else [operation.body]), *answers, *operation.errors]


def _described(operation: Operation, path: str, schemas: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    answers = {content: {"schema": _one_of(kinds, schemas)} for content, kinds in operation.answers.items()}
    errors = {MSGPACK if ErrorBody in operation.errors else JSON: {"schema": _one_of(operation.errors, schemas)}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answers}}
    if operation.optional:
        responses["204"] = {"description": "There is none now."}
    for status, meaning in STATUSES.items():
        responses[str(status)] = {"description": meaning, "content": errors}
        if status in (429, 503):
            responses[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [*_parameters(operation, path)],
        "responses": responses,
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[operation.body]}}}
    return described


def _one_of(kinds: tuple[type, ...], schemas: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    return {"anyOf": [schemas[kind] for kind in kinds]} if kinds else {}


def _parameters(operation: Operation, path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for place, names in (("header", operation.headers), ("query", operation.query)):
        for name in names:
            yield {"name": name, "in": place, "required": False, "schema": {"type": "string"}}
