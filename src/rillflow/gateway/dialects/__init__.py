"""The dialects of agents, each a module with the functions of `Dialect`, and their routes.

The routes exist twice, with the session in the path (`in_session`) and without, by the session's key.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol, get_type_hints

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import RillflowError
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call
from rillflow.gateway.dialects import chat, completions, messages, responses
from rillflow.gateway.shapes import (
    AnthropicErrorAnswer,
    AnthropicModel,
    AnthropicModels,
    ChatAnswer,
    CompletionAnswer,
    CountAnswer,
    ErrorAnswer,
    MessagesAnswer,
    Model,
    Models,
    ResponsesAnswer,
    ResponsesCount,
)
from rillflow.gateway.trees.render import Renderer
from rillflow.types.routes import JSON, Route, raw, routes_of
from rillflow.wire.messages import Request

EVENTS = "text/event-stream"
SESSION = "/s/{session}"

_OPENAI, _ANTHROPIC = (ErrorAnswer,), (AnthropicErrorAnswer,)
_EITHER = _OPENAI + _ANTHROPIC
_COUNTS = "only counts: the session does not change"
_SAMPLES = "an answer that is not read is aborted, and its node in the session's tree is never trained on"


class Dialect(Protocol):
    """The interface of one provider. A decoded request has a `model` and may have a `stream`."""

    PATH: str

    def decode(self, raw: bytes, limits: GatewayConfig) -> Any:
        """Return the request, checked against the limits. Raises CallRefused with the name of a wrong field."""

    def to_call(self, request: Any, defaults: SamplingConfig) -> Call: ...

    def whole(self, request: Any, answer: Answer, renderer: Renderer) -> bytes:
        """Return the JSON body of an answer that has ended."""

    def stream(self, request: Any, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
        """Yield server-sent events while the answer is sampled."""

    def error_body(self, error: RillflowError) -> ErrorAnswer | AnthropicErrorAnswer: ...

    def error_event(self, error: RillflowError) -> bytes: ...


DIALECTS: tuple[Dialect, ...] = (chat, completions, responses, messages)


def dialect_of(request: Request) -> Dialect:
    """Return the dialect in which a request is answered, also if it failed before its body was read."""
    path = request.path
    for dialect in DIALECTS:
        if path.endswith(dialect.PATH):
            return dialect
    return messages if path.endswith(messages.COUNT_PATH) or speaks_anthropic(request) else chat


def speaks_anthropic(request: Request) -> bool:
    """Return whether the client is Anthropic's: those send the version of its interface with every request."""
    return "anthropic-version" in request.headers


# ---------------------------------------------------------------- routes


def _asking(summary: str, dialect: Any, answer: type) -> Route[Any, Any]:
    return raw(
        "POST", dialect.PATH, "node", summary=summary, body=get_type_hints(dialect.decode)["return"], again=_SAMPLES,
        answers={JSON: (answer,), EVENTS: ()}, errors=_ANTHROPIC if dialect is messages else _OPENAI,
    )  # fmt: skip


class AgentRoutes:
    """The routes of the providers, for agents."""

    ask_chat = _asking("OpenAI chat completions", chat, ChatAnswer)
    ask_completions = _asking("OpenAI completions", completions, CompletionAnswer)
    ask_responses = _asking("OpenAI responses", responses, ResponsesAnswer)
    ask_messages = _asking("Anthropic messages", messages, MessagesAnswer)
    count_input = raw(
        "POST", responses.COUNT_PATH, "node", summary="How many tokens the prompt of a response has",
        body=responses.ResponsesRequest, again=_COUNTS, answers={JSON: (ResponsesCount,)}, errors=_OPENAI,
    )  # fmt: skip
    count = raw(
        "POST", messages.COUNT_PATH, "node", summary="How many tokens the prompt of a message has",
        body=messages.CountRequest, again=_COUNTS, answers={JSON: (CountAnswer,)}, errors=_ANTHROPIC,
    )  # fmt: skip
    response = raw(
        "GET", f"{responses.PATH}/{{response}}", "node", summary="A response of this session",
        answers={JSON: (ResponsesAnswer,)}, errors=_OPENAI,
    )  # fmt: skip
    models = raw(
        "GET", "/v1/models", "node", summary="The policies, as models",
        answers={JSON: (Models, AnthropicModels)}, errors=_EITHER, headers=("anthropic-version",),
    )  # fmt: skip
    model = raw(
        "GET", "/v1/models/{model}", "node", summary="One policy, as a model",
        answers={JSON: (Model, AnthropicModel)}, errors=_EITHER, headers=("anthropic-version",),
    )  # fmt: skip


ASKING = {route.path: route for route in routes_of(AgentRoutes) if EVENTS in route.answers}


def in_session(route: Route[Any, Any]) -> Route[Any, Any]:
    """Return the form of an agent's route that names the session."""
    return replace(route, path=f"{SESSION}{route.path}")


# ---------------------------------------------------------------- the policies as models


def listed_models(request: Request, names: list[str], created: int) -> Models | AnthropicModels:
    """Return the names that agents may ask for, as the list of models of the client's provider."""
    if speaks_anthropic(request):
        listed = [_anthropic_model(name, created) for name in names]
        return AnthropicModels(data=listed, has_more=False, first_id=names[0], last_id=names[-1])
    return Models(data=[_model(name, created) for name in names])


def shown_model(request: Request, name: str, created: int) -> Model | AnthropicModel:
    """Return one name as a model of the client's provider."""
    return _anthropic_model(name, created) if speaks_anthropic(request) else _model(name, created)


def _model(name: str, created: int) -> Model:
    return Model(id=name, created=created, owned_by="rillflow")


def _anthropic_model(name: str, created: int) -> AnthropicModel:
    since = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(id=name, display_name=name, created_at=since, lifecycle="active")
