"""Web search against a real server that speaks the services' interfaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rillflow.agents.tools import web_search
from rillflow.agents.tools.toolbox import OpenToolbox, open_toolbox
from rillflow.config import ToolConfig
from rillflow.errors import ConfigError, EnvironmentLost

Answer = Callable[[web.Request, int], Any]


@asynccontextmanager
async def service(
    answer: Answer, timeout: float = 30.0, **options: Any
) -> AsyncIterator[tuple[OpenToolbox, list[web.Request]]]:
    """A toolbox whose web search asks a server that answers like this; `answer` also gets how many came before."""
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        said = answer(request, len(seen) - 1)
        return said if isinstance(said, web.StreamResponse) else web.json_response(await said)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = ToolConfig(name="web_search", options={"url": f"http://127.0.0.1:{port}/", **options}, timeout=timeout)
    box = await open_toolbox([config])
    try:
        yield box, seen
    finally:
        await box.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_search, "_BACKOFF", 0.001)
    monkeypatch.setenv("TAVILY_API_KEY", "tv-key")
    monkeypatch.setenv("BRAVE_API_KEY", "br-key")


async def test_tavily() -> None:
    async def answer(request: web.Request) -> dict[str, Any]:
        asked = await request.json()
        assert (request.method, request.path) == ("POST", "/search")
        assert request.headers["Authorization"] == "Bearer tv-key"
        rows = [{"title": f"T{n}", "url": f"http://x/{n}", "content": asked["query"]} for n in range(5)]
        return {"results": rows, "asked": asked["max_results"]}

    async with service(lambda request, _: answer(request), results=2) as (box, _):
        said = await box.call("web_search", {"query": "tall ships"})
    assert said == "[1] T0 (http://x/0): tall ships\n[2] T1 (http://x/1): tall ships"


async def test_brave() -> None:
    async def answer(request: web.Request) -> dict[str, Any]:
        assert request.path == "/res/v1/web/search"
        assert request.headers["X-Subscription-Token"] == "br-key"
        assert dict(request.query) == {"q": "a & b", "count": "5"}
        return {"web": {"results": [{"title": "T", "url": "u", "description": "d"}]}}

    async with service(lambda request, _: answer(request), service="brave") as (box, _):
        assert await box.call("web_search", {"query": "a & b"}) == "[1] T (u): d"


async def test_a_busy_service_is_asked_again() -> None:
    def answer(_: web.Request, before: int) -> web.Response:
        return web.Response(status=(429, 503)[before]) if before < 2 else web.json_response({"results": []})

    async with service(answer) as (box, seen):
        assert await box.call("web_search", {"query": "x"}) == "nothing was found"
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("response", "asked", "why"),
    [
        (lambda: web.Response(status=500), 4, "does not answer: status 500"),
        (lambda: web.Response(status=401), 1, "refuses the key"),
        (lambda: web.Response(status=404), 1, "status 404"),
        (lambda: web.Response(status=204), 1, "status 204"),
        (lambda: web.Response(text="<html>"), 1, "does not answer with JSON"),
        (lambda: web.Response(body=b" " * (5 << 20)), 1, "more than"),
    ],
)
async def test_what_is_not_the_models_fault_fails_the_episode(response: Any, asked: int, why: str) -> None:
    async with service(lambda *_: response()) as (box, seen):
        with pytest.raises(EnvironmentLost, match=why):
            await box.call("web_search", {"query": "x"})
    assert len(seen) == asked


async def test_a_service_that_hangs_fails_the_episode() -> None:
    goes_on = asyncio.Event()
    async with service(lambda *_: goes_on.wait(), timeout=0.5) as (box, _):
        with pytest.raises(EnvironmentLost, match=r"does not answer within 0\.4 s"):
            await box.call("web_search", {"query": "x"})
        goes_on.set()


@pytest.mark.parametrize("status", [400, 422])
async def test_a_refused_query_is_told_to_the_model(status: int) -> None:
    async with service(lambda *_: web.Response(status=status)) as (box, _):
        assert await box.call("web_search", {"query": "x"}) == f"error: the search refuses this query (status {status})"
        assert await box.call("web_search", {"query": " "}) == "error: the query is empty"


async def test_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAVILY_API_KEY")
    with pytest.raises(ConfigError, match="TAVILY_API_KEY is not set"):
        await open_toolbox([ToolConfig(name="web_search")])
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        await open_toolbox([ToolConfig(name="web_search", options={"key_variable": "MY_KEY"})])
