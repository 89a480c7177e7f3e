"""The dialects of agents. Each is a module with the functions of `Dialect`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, Protocol

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import RillflowError
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call
from rillflow.gateway.dialects import chat, completions, messages, responses
from rillflow.gateway.shapes import (
    AnthropicErrorAnswer,
    AnthropicModel,
    AnthropicModels,
    ErrorAnswer,
    Model,
    Models,
)
from rillflow.gateway.trees.render import Renderer
from rillflow.wire.messages import Request


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
