"""A running gateway with one open session, over real HTTP, for tests of what agents may send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gateway_support import CHATML, ScriptedEngine, make_renderer, says

from rillflow.config import SamplingConfig
from rillflow.gateway import Gateway, Policy
from rillflow.gateway.control import Control
from rillflow.gateway.engine_pool import Fleet
from rillflow.gateway.feed import Feed
from rillflow.gateway.rollout_manager import RolloutManager, add_engine_routes

TOKEN = "the-run-token"


class Served:
    """`script` says what the engine answers next."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, renderer: Any) -> None:
        self.gateway = gateway
        self.engine = engine
        self.renderer = renderer
        self.key = gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=300)
        self.url = ""

    def script(self, *texts: str, **arguments: Any) -> None:
        self.engine.scripts += [says(self.renderer, text, **arguments) for text in texts]

    async def call(
        self, method: str, path: str, *, key: str | None = None, headers: dict[str, str] | None = None, **send: Any
    ) -> tuple[int, Any, Any]:
        """Status, body (read, where it is JSON) and headers; with the session's key unless another is given."""
        key = self.key if key is None else key
        all_headers = ({"authorization": f"Bearer {key}"} if key else {}) | (headers or {})
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self.url + path, headers=all_headers, **send) as response,
        ):
            body = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(body) if is_json else body, response.headers


def add_control(gateway: Gateway) -> None:
    """All routes that a node adds, with no engine and no task behind them."""
    feed = Feed()
    feed.close()
    Control(gateway, feed, on_reward=lambda session: None, givers="agent")
    add_engine_routes(gateway, RolloutManager(Fleet()))


@asynccontextmanager
async def served(
    template: str = CHATML,
    *,
    tools: str = "auto",
    reasoning: str = "auto",
    prepare: Callable[[Gateway], object] | None = None,
    **arguments: Any,
) -> AsyncIterator[Served]:
    engine, renderer = ScriptedEngine(), make_renderer(template)
    policy = Policy(engine, renderer, tools, reasoning)
    gateway = Gateway(
        TOKEN, {"policy": policy}, {"policy": SamplingConfig(temperature=0.7, top_k=5, max_tokens=50)}, **arguments
    )
    if prepare is not None:
        prepare(gateway)
    made = Served(gateway, engine, renderer)
    made.url = await gateway.start()
    try:
        yield made
    finally:
        await gateway.stop()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")
