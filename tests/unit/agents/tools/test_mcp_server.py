"""Our tools for other agents: the official client finds and calls them, over pipes, HTTP and in one process."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters

from rillflow.agents.tools.calculator import calculator
from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.mcp_tools import build_server
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.errors import SandboxError
from rillflow.wire.loopback import served


async def broken() -> str:
    """Break."""
    raise SandboxError("the sandbox is gone", "look at it")


async def needy(episode: Any) -> str:
    """Need an episode."""
    return "never"


BOX = OpenToolbox([tool_of(calculator), tool_of(broken), tool_of(needy)])


def text_of(result: Any) -> str:
    return "".join(block.text for block in result.content)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_what_a_client_sees(mode: str) -> None:
    async with Client(build_server(BOX), mode=mode) as client:
        found = (await client.list_tools()).tools
        assert [tool.name for tool in found] == ["calculator", "broken", "needy"]
        assert found[0].input_schema["required"] == ["expression"]
        said = await client.call_tool("calculator", {"expression": "2 + 2"})
        assert (text_of(said), said.is_error) == ("4", False)
        said = await client.call_tool("calculator", {"expression": "two"})
        assert said.is_error
        said = await client.call_tool("broken", {})
        assert "the sandbox is gone" in text_of(said)
        assert said.is_error
        assert text_of(await client.call_tool("needy", {})) == "error: needy works only within an episode"


async def test_over_http_the_token_is_needed() -> None:
    app = build_server(BOX).streamable_http_app(stateless_http=True, json_response=True)
    async with served(app, "right", 0, what="it") as (url, _), httpx2.AsyncClient() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            for path in ("/mcp", "/", "/anything"):
                assert (await client.post(f"{url}{path}", headers=headers, json={})).status_code == 401
        for scheme in ("Bearer", "bearer"):
            good = await client.post(f"{url}/anything", headers={"authorization": f"{scheme} right"}, json={})
            assert good.status_code == 404


async def test_the_command_serves_pipes(tmp_path: Any) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: quickstart\nname: mine\ntools: [calculator]\n")
    words = shlex.split(f"-m rillflow tools {recipe} --serve stdio")
    async with Client(StdioServerParameters(command=sys.executable, args=words)) as client:
        assert text_of(await client.call_tool("calculator", {"expression": "6 * 7"})) == "42"
