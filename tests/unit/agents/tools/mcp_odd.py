"""An MCP server for tests: what servers may do, good and bad. `python mcp_odd.py [--dead]`."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("odd", log_level="ERROR")
SAFE = ToolAnnotations(read_only_hint=True)


@server.tool(annotations=SAFE, structured_output=False)
def pid() -> str:
    """Whose process this is."""
    return str(os.getpid())


@server.tool(structured_output=False)
def write() -> str:
    """Changes something, then dies."""
    os._exit(1)


@server.tool(annotations=SAFE, structured_output=False)
def die_once(marker: str) -> str:
    """Dies at its first call."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)
    return "alive"


@server.tool(structured_output=False)
def big() -> str:
    """Says a lot."""
    return "x" * 100_000


@server.tool(structured_output=False)
def hang() -> str:
    """Never answers."""
    time.sleep(600)
    return ""


@server.tool(structured_output=False)
def mixed() -> list[TextContent | ImageContent]:
    """Text and a picture."""
    return [TextContent(text="look:"), ImageContent(data="aGk=", mime_type="image/png")]


@server.tool(structured_output=False)
def secret() -> str:
    """Return the environment."""
    return ",".join(f"{name}={os.environ.get(name)}" for name in ("GIVEN", "HIDDEN_KEY"))


@server.tool()
def unwanted() -> str:
    """Not for agents."""
    return ""


if __name__ == "__main__":
    if "--dead" in sys.argv:
        sys.exit("no licence for this machine")
    server.run()
