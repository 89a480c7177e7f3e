"""Streams that are held before their first token: they begin anyway, and real clients take no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from gateway_support import ScriptedEngine, chunk, make_renderer, says
from openai import AsyncOpenAI
from serving import Served, served, until

from rillflow.config import GatewayConfig
from rillflow.errors import EngineError
from rillflow.gateway import anthropic_url, lifetime, session_url
from rillflow.types import Chunk, GenerateRequest

USER: Any = {"role": "user", "content": "hello"}
DIALECTS = ("chat", "completions", "responses", "messages")


class Clients:
    """The stock clients of both providers, as their authors set them up."""

    def __init__(self, gateway: Served) -> None:
        self.openai = AsyncOpenAI(base_url=session_url(gateway.url, "s1"), api_key=gateway.key)
        import anthropic  # it takes seconds, and every worker imports this module

        self.anthropic = anthropic.AsyncAnthropic(base_url=anthropic_url(gateway.url, "s1"), api_key=gateway.key)

    async def stream(self, dialect: str) -> Any:
        """Return the open stream: its status line and headers have come."""
        if dialect == "messages":
            return await self.anthropic.messages.create(model="policy", messages=[USER], max_tokens=20, stream=True)
        if dialect == "chat":
            return await self.openai.chat.completions.create(model="policy", messages=[USER], stream=True)
        if dialect == "completions":
            return await self.openai.completions.create(model="policy", prompt="hello", stream=True)
        return await self.openai.responses.create(model="policy", input="hello", stream=True)

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "PATIENCE", 0.01)
    monkeypatch.setattr(lifetime, "QUIET", 0.02)


async def text_of(stream: Any) -> str:
    """Return the text that a client builds from the events of any dialect."""
    said = []
    async for event in stream:
        if hasattr(event, "choices"):
            choice = event.choices[0]
            said.append((choice.delta.content if hasattr(choice, "delta") else choice.text) or "")
        elif event.type == "response.output_text.delta":
            said.append(event.delta)
        elif event.type == "content_block_delta":
            said.append(event.delta.text)
    return "".join(said)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_begins_before_its_first_token(dialect: str) -> None:
    async with served() as gateway:
        clients = Clients(gateway)
        gateway.engine.scripts.append([None, *says(gateway.renderer, "abc hello")])
        stream = await asyncio.wait_for(clients.stream(dialect), 60)
        gateway.engine.gate.set()
        assert await text_of(stream) == "abc hello"
        await clients.close()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_error_after_the_headers_is_raised_by_the_clients(dialect: str) -> None:
    import anthropic

    async with served() as gateway:
        clients = Clients(gateway)
        gateway.engine.scripts.append([None, EngineError("the engine broke")])
        stream = await asyncio.wait_for(clients.stream(dialect), 60)
        gateway.engine.gate.set()
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine broke"):
            await text_of(stream)
        await clients.close()


async def test_a_stream_that_waits_for_other_calls_of_its_session_begins() -> None:
    async with served(limits=GatewayConfig(concurrent=1)) as gateway:
        clients = Clients(gateway)
        gateway.engine.scripts += [[None, *says(gateway.renderer, text)] for text in ("first", "second")]
        first = await asyncio.wait_for(clients.stream("chat"), 60)
        second = await asyncio.wait_for(clients.stream("chat"), 60)
        assert len(gateway.engine.requests) == 1
        gateway.engine.gate.set()
        assert [await text_of(stream) for stream in (first, second)] == ["first", "second"]
        await clients.close()


class Patient(ScriptedEngine):
    """Answers no call until the given number of calls is at the gateway."""

    def __init__(self, gateway: Served, calls: int) -> None:
        super().__init__()
        self._session = gateway.gateway.sessions.get("s1")
        self._calls = calls
        self.together = 0
        self.most = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.together += 1
        self.most = max(self.most, self.together)
        try:
            await until(lambda: len(self.requests) + len(self._session.at_work) - self.together >= self._calls)
            yield chunk(make_renderer().encode("abc"), finish="stop")
        finally:
            self.together -= 1


async def test_three_hundred_calls_at_once_of_a_stock_client_are_all_answered() -> None:
    """With 64 running calls and a 429 for the others, 40 still failed after the client's own retries."""
    async with served() as gateway:
        clients, engine = Clients(gateway), Patient(gateway, 300)
        policies = gateway.gateway._policies
        policies["policy"].engine = engine
        asked = [clients.openai.chat.completions.create(model="policy", messages=[USER]) for _ in range(300)]
        answers = await asyncio.gather(*asked)
        assert {answer.choices[0].message.content for answer in answers} == {"abc"}
        assert len(engine.requests) == 300, "nobody had to ask twice"
        assert engine.most == GatewayConfig().concurrent
        await clients.close()
