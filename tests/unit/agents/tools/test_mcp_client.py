"""Tools of real MCP servers: over pipes and HTTP, and what happens when a server dies."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rillflow.agents.tools import mcp_tools
from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.mcp_tools import build_server
from rillflow.agents.tools.toolbox import OpenToolbox, open_toolbox
from rillflow.config import ToolConfig
from rillflow.errors import ConfigError, EnvironmentLost
from rillflow.examples import stockroom, stockroom_mcp
from rillflow.wire.loopback import served

ODD = shlex.join([sys.executable, str(Path(__file__).parent / "mcp_odd.py")])
ONLY = ["pid", "write", "die_once", "big", "hang", "mixed", "secret"]
TOKEN = "a-token"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start slowly where many tests run at once."""
    monkeypatch.setattr(mcp_tools, "OPENING", 240.0)


@asynccontextmanager
async def opened(timeout: float = 240.0, **mcp: Any) -> AsyncIterator[OpenToolbox]:
    box = await open_toolbox([ToolConfig(mcp=mcp, timeout=timeout, output=1000)])
    try:
        yield box
    finally:
        await box.close()


@asynccontextmanager
async def http(server: Any, port: int = 0) -> AsyncIterator[str]:
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    async with served(app, TOKEN, port, what="the test's server") as (url, _):
        yield f"{url}/mcp"


async def test_over_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_KEY", "ours")
    monkeypatch.setenv("A_KEY", "theirs")
    async with opened(command=ODD, environment={"GIVEN": "${A_KEY}"}, only=ONLY) as box:
        assert box.names() == ONLY  # of eight
        first = int(await box.call("pid", {}))
        assert await box.call("secret", {}) == "GIVEN=theirs,HIDDEN_KEY=None"
        assert await box.call("mixed", {}) == "look:\n[image]"
        assert (await box.call("big", {})).endswith("… (99000 characters more)")
        # A call that its server's death has cut is made again where the server says that it changes nothing.
        assert await box.call("die_once", {"marker": str(tmp_path / "died")}) == "alive"
        second = int(await box.call("pid", {}))
        assert second != first
        hurried: Any = SimpleNamespace(payload={}, seconds_left=lambda: 0.3)
        assert await box.call("hang", {}, hurried) == "error: hang took longer than 0.3 s"
        # One that may have changed something is not: the episode fails, and the next one finds a new server.
        with pytest.raises(EnvironmentLost, match="was lost in a call"):
            await box.call("write", {})
        third = int(await box.call("pid", {}))
        assert third not in {first, second}
    assert not any(psutil.pid_exists(pid) for pid in (first, second, third))


async def test_over_http_with_what_the_payload_fills_in() -> None:
    payload = next(stockroom.prompts("train", 1, 0))["payload"]
    episode: Any = SimpleNamespace(payload=payload, seconds_left=lambda: 240.0)
    async with http(stockroom_mcp.server) as url:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with opened(url=url, headers=headers, fill={"stock": "stock"}) as box:
            assert box.schemas == stockroom.TOOLS
            asked = [box.call("count", {"box": b, "item": "pens"}, episode) for b in stockroom.BOXES]
            assert await asyncio.gather(*asked) == [str(payload["stock"][b]["pens"]) for b in stockroom.BOXES]
            assert "no gold box" in await box.call("count", '{"box": "gold", "item": "pens"}', episode)
            forged = '{"box": "red", "item": "pens", "stock": {"red": {"pens": 1}}}'
            assert (await box.call("count", forged, episode)).startswith("error: stock: unknown")
            assert "only within an episode" in await box.call("count", {"box": "red", "item": "pens"})


async def test_a_server_that_comes_back_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_BACKOFF", (0.0, 0.01))

    async def ping() -> str:
        """Answer."""
        return "pong"

    def server() -> Any:
        return build_server(OpenToolbox([tool_of(ping)]))

    async with http(server()) as url:
        box = await open_toolbox([ToolConfig(mcp={"url": url, "headers": {"Authorization": f"Bearer {TOKEN}"}})])
        assert await box.call("ping", {}) == "pong"
    try:
        with pytest.raises(EnvironmentLost):
            await box.call("ping", {})
        with pytest.raises(EnvironmentLost, match="cannot be reached"):
            await box.call("ping", {})
        async with http(server(), int(url.split(":")[2].split("/")[0])):
            assert await box.call("ping", {}) == "pong"
    finally:
        await box.close()


async def test_servers_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_BACKOFF", (0.0,))
    async with http(stockroom_mcp.server) as url:
        good = {"Authorization": f"Bearer {TOKEN}"}
        cases: list[tuple[dict[str, Any], str]] = [
            ({"url": url}, "cannot be reached"),
            ({"url": url, "headers": {"Authorization": "Bearer no"}}, "cannot be reached"),
            ({"url": url, "headers": good, "only": ["count", "weigh"]}, "has no tool weigh"),
            ({"url": url, "headers": good, "fill": {"shelf": "stock"}}, "has an argument shelf"),
            ({"url": url, "headers": {"Authorization": "Bearer ${NO_SUCH_KEY}"}}, "NO_SUCH_KEY is not set"),
            ({"command": "no-such-program --port 1"}, "no program"),
            ({"command": f"{ODD} --dead"}, "no licence for this machine"),
        ]
        for mcp, why in cases:
            with pytest.raises(ConfigError, match=why):
                await open_toolbox([ToolConfig(mcp=mcp)])


async def test_a_payload_without_what_is_to_be_filled_in() -> None:
    async with http(stockroom_mcp.server) as url:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with opened(url=url, headers=headers, fill={"stock": "shelves"}) as box:
            episode: Any = SimpleNamespace(payload={}, seconds_left=lambda: 240.0)
            with pytest.raises(ConfigError, match="the payload has no 'shelves'"):
                await box.call("count", {"box": "red", "item": "pens"}, episode)


def test_values_from_the_environment() -> None:
    os.environ.pop("NO_SUCH_KEY", None)
    assert mcp_tools.filled({"a": "$$5 ${HOME}"}, "headers") == {"a": f"$5 {os.environ['HOME']}"}
    with pytest.raises(ConfigError, match="Invalid placeholder"):
        mcp_tools.filled({"a": "$"}, "headers")
