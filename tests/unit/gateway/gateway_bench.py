"""A running gateway over real HTTP, with one open session and the real OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gateway_support import CHATML, FORGETFUL, ScriptedEngine, make_renderer, says
from openai import AsyncOpenAI

from rillflow.config import SamplingConfig
from rillflow.gateway import Gateway, Policy, session_url

TOKEN = "the-run-token"
RENDERERS = {template: make_renderer(template) for template in (CHATML, FORGETFUL)}
RENDERER = RENDERERS[CHATML]
CALL = '<tool_call>\n{"name": "count", "arguments": {"box": "red"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
USER: Any = {"role": "user", "content": "hello"}


class Bench:
    """A running gateway with one open session and its client."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, url: str, key: str) -> None:
        self.gateway = gateway
        self.engine = engine
        self.url = url
        self.key = key
        self.client = AsyncOpenAI(base_url=session_url(url, "s1"), api_key=key, max_retries=0, timeout=60)

    def script(self, *texts: str, **arguments: Any) -> None:
        self.engine.scripts += [says(RENDERER, text, **arguments) for text in texts]

    async def ask(self, *messages: Any, **arguments: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=list(messages) or [USER], **arguments)

    async def raw(self, path: str, body: Any, key: str | None) -> tuple[int, dict[str, Any], Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body, headers=headers) as response,
        ):
            return response.status, await response.json(), response.headers


class HandClock:
    time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


@asynccontextmanager
async def running(template: str = CHATML, wins: Any = None, **arguments: Any) -> AsyncIterator[Bench]:
    engine = ScriptedEngine()
    gateway = Gateway(
        TOKEN,
        {"policy": Policy(engine, RENDERERS[template])},
        {"policy": SamplingConfig(temperature=0.7, top_k=5, max_tokens=50, wins=wins)},
        **arguments,
    )
    url = await gateway.start()
    bench = Bench(gateway, engine, url, gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=60))
    try:
        yield bench
    finally:
        await bench.client.close()
        await gateway.stop()
