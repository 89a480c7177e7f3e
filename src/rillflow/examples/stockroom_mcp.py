"""The stockroom's tool as an MCP server that knows nothing of runs, episodes or policies.

    python -m rillflow.examples.stockroom_mcp               over standard input and output
    python -m rillflow.examples.stockroom_mcp --port 8770   over HTTP, with the token in STOCKROOM_TOKEN

Its tool `count` needs the stock in every call. The recipe's `fill` adds it from the prompt's payload, so models see and
write only the box and the item.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from rillflow.examples import stockroom
from rillflow.wire.loopback import served

server = MCPServer("stockroom", log_level="WARNING")


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def count(box: str, item: str, stock: dict[str, dict[str, int]]) -> str:
    """Count the pieces of one item in one box."""
    result = stockroom.count({"stock": stock}, {"box": box, "item": item})
    if result.startswith("error: "):
        raise ToolError(result.removeprefix("error: "))
    return result


async def serve(port: int, token: str) -> None:
    """Serve HTTP until the process ends."""
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    async with served(app, token, port, what="the stockroom") as (url, serving):
        print(f"{url}/mcp", flush=True)
        await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, help="serve HTTP on this loopback port; 0 takes a free one")
    options = parser.parse_args()
    if options.port is None:
        asyncio.run(server.run_stdio_async())
        return
    token = os.environ.get("STOCKROOM_TOKEN") or parser.error("set STOCKROOM_TOKEN: every call needs it")
    asyncio.run(serve(options.port, token))


if __name__ == "__main__":
    main()
