"""The OpenAI client of agents that play in the node's own process.

A `DirectClient` is an `openai.AsyncOpenAI`. Its whole chat completions reach the gateway by a function call: the
request is encoded once and the answer validated once, without sockets, HTTP parsing or the SDK's conversions. Sessions,
token trees and limits are the same as over HTTP.

Every other call goes over HTTP: streams, other routes, raw responses, calls with headers, a query or a timeout of their
own, and all calls of a copy with another base URL, key, timeout or HTTP client. A call that the gateway refuses is
repeated over HTTP, so that agents get the error class that they know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, wraps
from typing import Any, NamedTuple

import msgspec
import openai
import pydantic
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

from rillflow.errors import RillflowError
from rillflow.gateway.server import AGENT_HEADER

Chat = Callable[[bytes, str], Awaitable[bytes]]
_ONLY_HTTP = ("extra_headers", "extra_query", "timeout")


class _Session(NamedTuple):
    """The gateway's chat function for one session, and the settings with which a client means that session."""

    chat: Chat
    settings: tuple[Any, ...]


class DirectClient(openai.AsyncOpenAI):
    """Calls the gateway in this process once `call_directly` has said how; until then it is a plain client."""

    _session: _Session | None = None
    _agent = ""

    def call_directly(self, chat: Chat) -> None:
        """Send the whole chat completions of this client, and of its copies, to `chat`."""
        self._session = _Session(chat, self._settings())

    def _settings(self) -> tuple[Any, ...]:
        return str(self.base_url), self.api_key, self.timeout

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)

    def copy(self, **options: Any) -> DirectClient:
        made = super().copy(**options)
        headers = options.get("set_default_headers")
        made._agent = self._agent if headers is None else ""
        for name, value in (options.get("default_headers") or headers or {}).items():
            if name.lower() == AGENT_HEADER:
                made._agent = value
        if options.get("http_client") is None:
            made._session = self._session
        return made

    with_options = copy

    async def answer(self, options: Mapping[str, Any]) -> ChatCompletion | None:
        """Return the gateway's answer to a chat completion; None where it has to be asked for over HTTP."""
        session = self._session
        if session is None or self._settings() != session.settings:
            return None
        given = {name: value for name, value in options.items() if not isinstance(value, openai.NotGiven | openai.Omit)}
        extra = given.pop("extra_body", None) or {}
        if given.get("stream") or any(given.pop(name, None) is not None for name in _ONLY_HTTP):
            return None
        try:
            body = msgspec.json.encode({**given, **extra}, enc_hook=_plain)
            return ChatCompletion.model_validate_json(await session.chat(body, self._agent))
        except (TypeError, RillflowError):
            return None


def _plain(value: Any) -> Any:
    """Return the JSON form of what agents put into messages: answers of earlier calls are pydantic models."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    raise TypeError(f"{type(value).__name__} has no JSON form")


class _Chat(AsyncChat):
    def __init__(self, client: DirectClient) -> None:
        super().__init__(client)
        self._direct = client

    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._direct)


class _Completions(AsyncCompletions):
    def __init__(self, client: DirectClient) -> None:
        super().__init__(client)
        self._direct = client

    @wraps(AsyncCompletions.create)
    async def create(self, **options: Any) -> Any:  # type: ignore[override]
        answer = await self._direct.answer(options)
        return await super().create(**options) if answer is None else answer
