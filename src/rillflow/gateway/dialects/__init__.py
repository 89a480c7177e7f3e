"""The dialects that agents speak: one module each, which offers what `Dialect` names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import RillflowError
from rillflow.gateway.calls import Answer, Call
from rillflow.gateway.dialects import chat, completions, messages, responses
from rillflow.gateway.trees.render import Renderer
from rillflow.wire.messages import Request


class Dialect(Protocol):
    """One provider's way of asking for an answer. A request that was decoded has a `model` and may have a `stream`."""

    PATH: str

    def decode(self, raw: bytes, limits: GatewayConfig) -> Any:
        """The request, checked against the limits; CallRefused names the field that is wrong."""

    def to_call(self, request: Any, defaults: SamplingConfig) -> Call: ...

    def whole(self, request: Any, answer: Answer, renderer: Renderer) -> bytes:
        """The JSON body of an answer that has ended."""

    def stream(self, request: Any, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
        """Server-sent events while the answer is sampled."""

    def error_body(self, error: RillflowError) -> dict[str, Any]: ...

    def error_event(self, error: RillflowError) -> bytes: ...


DIALECTS: tuple[Dialect, ...] = (chat, completions, responses, messages)


def dialect_of(request: Request) -> Dialect:
    """The dialect in which a request is answered that may have failed before anything of it was read."""
    path = request.path
    for dialect in DIALECTS:
        if path.endswith(dialect.PATH):
            return dialect
    return messages if path.endswith(messages.COUNT_PATH) or speaks_anthropic(request) else chat


def speaks_anthropic(request: Request) -> bool:
    """Anthropic's clients name the version of its interface with every request."""
    return "anthropic-version" in request.headers
