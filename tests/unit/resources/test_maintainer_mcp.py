"""The maintainer's MCP server, called by the official client over stdio and HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from maintainer_world import World, info
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from rillflow.config.runs import ScalingConfig
from rillflow.resources.maintainer.loop import Maintainer
from rillflow.resources.mcp import serve_http

TOKEN = "a token"
TOOLS = {"balance_report", "list_nodes", "start_nodes", "retire_node", "set_target", "decision_log"}


def world_in(folder: Path, **scaling: Any) -> World:
    usual = {"least": 1, "most": 3, "cooldown": 60.0, "drain": 30.0}
    world = World(folder, ScalingConfig(**(usual | scaling)))
    world.own_workers = ["rollout-0"]
    world.infos = {"rollout-0": info("rollout-0")}
    world.report(10, 0.5)
    return world


@asynccontextmanager
async def over_http(maintainer: Maintainer, token: str = TOKEN) -> AsyncIterator[Client]:
    async with (
        served(maintainer) as url,
        httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


@asynccontextmanager
async def served(maintainer: Maintainer) -> AsyncIterator[str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_http(maintainer, TOKEN, 0, ready.set_result))
    try:
        yield await asyncio.wait_for(ready, 60)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def ask(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    answer = result.structured_content
    assert answer is not None
    return answer["result"] if set(answer) == {"result"} else answer


async def failing(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_over_http_an_agent_reads_the_report_and_sizes_the_pool(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    maintainer = world.maintainer(follow=False)
    async with over_http(maintainer) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        await until(lambda: maintainer.advice is not None)
        report = await ask(client, "balance_report")
        assert report["latest"]["version"] == 10
        assert (report["advice"]["branch"], report["advice"]["target"]) == ("grow", 2)
        assert world.log == [], "it acts only when it is told"
        outcome = await ask(client, "set_target", size=2)
        assert outcome["done"], outcome
        assert world.log == ["start auto-0"]
        world.clock.time += 5
        world.grow_up()
        await until(lambda: maintainer.state.nodes["auto-0"].joined is not None)
        nodes = await ask(client, "list_nodes")
        assert {node["name"]: node["standing"] for node in nodes["nodes"]} == {"rollout-0": "here", "auto-0": "here"}
        assert (nodes["target"], nodes["size"]) == (2, 2)


async def test_bounds_and_cooldown_hold_for_an_agent_too(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    maintainer = world.maintainer(follow=False)
    async with over_http(maintainer) as client:
        await until(lambda: maintainer.state.target is not None)
        assert "bounds: 1 to 3" in (await ask(client, "start_nodes", count=3))["why"]
        assert "bounds" in (await ask(client, "retire_node", name="rollout-0"))["why"]
        assert "at least 1" in await failing(client, "start_nodes", count=0)
        assert (await ask(client, "start_nodes", count=1))["done"]
        assert "still starting" in (await ask(client, "start_nodes", count=1))["why"]
        world.clock.time += 5
        world.grow_up()
        await until(lambda: maintainer.state.nodes["auto-0"].joined is not None)
        refused = await ask(client, "set_target", size=3)
        assert not refused["done"]
        assert "cooling down" in refused["why"]
        world.clock.time += 60
        assert "node auto-7 cannot be retired" in (await ask(client, "retire_node", name="auto-7"))["why"]
        assert (await ask(client, "retire_node", name="auto-0"))["done"]
        await until(lambda: world.log[-1] == "stop auto-0")
        log = await ask(client, "decision_log", last=100)
        assert [line["action"] for line in log if line["by"] == "agent"] == [
            "refused", "refused", "grow", "refused", "refused", "refused", "shrink",
        ]  # fmt: skip


async def test_a_dry_run_tells_what_would_be_done(tmp_path: Path) -> None:
    world = world_in(tmp_path, dry_run=True)
    async with over_http(world.maintainer(follow=False)) as client:
        outcome = await ask(client, "set_target", size=3)
        assert (outcome["done"], outcome["target"]) == (False, 3)
        assert "dry run" in outcome["why"]
        assert world.log == []


async def test_without_the_token_nothing_is_answered(tmp_path: Path) -> None:
    async with served(world_in(tmp_path).maintainer(follow=False)) as url, httpx2.AsyncClient() as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
            answer = await http.post(url, json={}, headers=headers)
            assert answer.status_code == 401
        assert (await http.post(url, json={}, headers={"authorization": f"Bearer {TOKEN}"})).status_code != 401
        foreign = {"authorization": f"Bearer {TOKEN}", "host": "evil.example", "origin": "http://evil.example"}
        assert (await http.post(url, json={}, headers=foreign)).status_code in (403, 421)


async def test_a_broken_run_is_told_to_the_agent(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    maintainer = world.maintainer(follow=False)
    async with over_http(maintainer) as client:
        world.broken = True
        outcome = await ask(client, "start_nodes", count=1)
        assert outcome["done"], "it is tried again by itself"
        log = json.dumps(await ask(client, "decision_log"))
        assert "no machine is free" in log


async def test_over_stdio_the_same_tools_answer(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("maintainer_stdio.py"))
    server = StdioServerParameters(command=sys.executable, args=[script, str(tmp_path)])
    async with Client(server) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        assert (await ask(client, "balance_report"))["latest"]["decision"]["target"] == 2
        assert (await ask(client, "start_nodes", count=1))["nodes"] == ["auto-0"]
        assert (await ask(client, "decision_log"))[-1]["action"] == "start"
