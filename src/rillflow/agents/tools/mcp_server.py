"""A toolbox as an MCP server, for any agent that speaks the protocol.

Over HTTP it serves loopback only, and every call needs a token. A tool that needs an episode answers with an error,
because there is none here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rillflow import __version__
from rillflow.contracts import Toolbox
from rillflow.errors import ConfigError, RillflowError
from rillflow.wire.loopback import served

if TYPE_CHECKING:
    from mcp.server import Server


def build_server(toolbox: Toolbox, name: str = "rillflow-tools") -> Server[Any]:
    """Return the server. Errors that a model can correct are results with `is_error`, as the protocol requires."""
    try:
        import mcp_types as wire
        from mcp.server import Server
    except ImportError:
        raise ConfigError("the package `mcp` is not installed", "pip install 'rillflow[mcp]'") from None
    tools = [
        wire.Tool(
            name=schema["function"]["name"],
            description=schema["function"]["description"],
            input_schema=schema["function"]["parameters"],
        )
        for schema in toolbox.schemas
    ]

    async def list_tools(context: Any, asked: wire.PaginatedRequestParams | None) -> wire.ListToolsResult:
        return wire.ListToolsResult(tools=tools)

    async def call_tool(context: Any, asked: wire.CallToolRequestParams) -> wire.CallToolResult:
        try:
            text = await toolbox.call(asked.name, asked.arguments or {})
        except RillflowError as error:  # a sandbox or another server is gone
            text = f"error: {error}"
        return wire.CallToolResult(content=[wire.TextContent(text=text)], is_error=text.startswith("error: "))

    return Server(name, version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)


async def serve_stdio(server: Server[Any]) -> None:
    """Serve until the client closes our standard input."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def serve_http(server: Server[Any], token: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until cancelled. `on_ready` gets the URL."""
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    async with served(app, token, port, what="the MCP server") as (url, serving):
        on_ready(f"{url}/mcp")
        await asyncio.shield(serving)
