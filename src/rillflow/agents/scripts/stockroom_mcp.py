"""The stockroom's tool as an MCP server: a program of its own that knows nothing of runs, episodes or policies.

    python -m rillflow.agents.scripts.stockroom_mcp               over standard input and output
    python -m rillflow.agents.scripts.stockroom_mcp --port 8770   over HTTP, with the token in STOCKROOM_TOKEN

Its `count` takes the stock with every call; the recipe's `fill` gives it from the prompt's payload, so that models see
and write only the box and the item.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from rillflow.agents.environments import stockroom
from rillflow.wire.loopback import served

server = MCPServer("stockroom", log_level="WARNING")


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def count(box: str, item: str, stock: dict[str, dict[str, int]]) -> str:
    """Count the pieces of one item in one box."""
    said = stockroom.count({"stock": stock}, {"box": box, "item": item})
    if said.startswith("error: "):
        raise ToolError(said.removeprefix("error: "))
    return said


async def serve(port: int, token: str) -> None:
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    async with served(app, token, port, what="the stockroom") as (url, serving):
        print(f"{url}/mcp", flush=True)
        await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, help="serve HTTP on this port of loopback; 0 for any")
    options = parser.parse_args()
    if options.port is None:
        asyncio.run(server.run_stdio_async())
        return
    token = os.environ.get("STOCKROOM_TOKEN") or parser.error("set STOCKROOM_TOKEN: every call has to show it")
    asyncio.run(serve(options.port, token))


if __name__ == "__main__":
    main()
