"""The maintainer's report and actions over MCP, for an agent that maintains a run.

The loop's own code carries them out, with the same bounds, cooldown and dry run: an agent's worst mistake is a wrong
size within the bounds. Over HTTP every call needs the token; only loopback is served. This does not protect against
other users of the machine who can read the token's file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.errors import ConfigError, RillflowError
from rillflow.resources.maintainer.loop import Maintainer, Outcome
from rillflow.wire.loopback import served

if TYPE_CHECKING:
    from mcp.server import MCPServer

INSTRUCTIONS = """You maintain the pool of rollout nodes of a reinforcement learning run.
Call balance_report every minute or so. When its `latest.version` is one that you have not seen, look at `advice`: its
`target` is the pool size, in GPUs, that fits what the trainer takes. Then call set_target with that many nodes (a node
has one GPU unless list_nodes says otherwise), or retire_node to choose who goes: gone nodes first, then suspect ones,
then the one with the lowest `rate`. Act at most once on each report, and not at all when it says hold. A refusal tells
why: wait for the next report, do not try again before. Nodes that die are replaced without you."""
_MOST_LINES = 500


def build_server(maintainer: Maintainer) -> MCPServer[Any]:
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise ConfigError("the package `mcp` is not installed", "pip install 'rillflow[mcp]'") from None
    server: MCPServer[Any] = MCPServer("rillflow-maintainer", instructions=INSTRUCTIONS, log_level="WARNING")

    def told(error: RillflowError) -> ToolError:
        return ToolError(str(error))

    @server.tool()
    async def balance_report() -> dict[str, Any]:
        """The balance between rollout and training: `latest` is the last full report, `current` the window since (not
        full yet), `advice` what the loop would do on the latest: its branch, the target in GPUs, and why."""
        try:
            balance, _, _ = await maintainer.look()
        except RillflowError as error:
            raise told(error) from None
        return {**msgspec.to_builtins(balance), "advice": _advice(maintainer)}

    @server.tool()
    async def list_nodes() -> dict[str, Any]:
        """Every rollout node: whose it is (own: started here; run: the run's; other: by hand, or in a trainer's
        process), its standing, GPUs, rate (samples/s and GPU over the last reports) and whether it is suspect. `target`
        is the number of nodes to reach; `size` the present number."""
        try:
            _, pool, look = await maintainer.look()
        except RillflowError as error:
            raise told(error) from None
        infos = {info.name: msgspec.to_builtins(info) for info in look.infos}
        nodes = [{**msgspec.to_builtins(m), "counts": m.counts, "node": infos.get(m.name)} for m in pool]
        return {"target": maintainer.state.target, "size": sum(m.counts for m in pool), "nodes": nodes}

    @server.tool()
    async def start_nodes(count: int) -> dict[str, Any]:
        """Start `count` more nodes. Refused outside of the bounds, within the cooldown, and while others start."""
        if count < 1:
            raise ToolError("count is at least 1; to have fewer nodes, call retire_node or set_target")
        return await _asked(lambda: maintainer.resize(more=count), told)

    @server.tool()
    async def retire_node(name: str) -> dict[str, Any]:
        """Drain this node and end it: it gets no more tasks and ends those it has. Refused as start_nodes is."""
        return await _asked(lambda: maintainer.retire(name), told)

    @server.tool()
    async def set_target(size: int) -> dict[str, Any]:
        """Set the total number of nodes: starts new ones, or retires suspect and slow ones. Refused as start_nodes
        is."""
        return await _asked(lambda: maintainer.resize(size), told)

    @server.tool()
    async def decision_log(last: int = 20) -> list[dict[str, Any]]:
        """The last decisions and actions, the newest at the end, yours and the refused ones among them."""
        lines = maintainer.lines(max(1, min(last, _MOST_LINES)))
        return [msgspec.to_builtins(line) for line in lines]

    return server


def _advice(maintainer: Maintainer) -> dict[str, Any] | None:
    return None if maintainer.advice is None else msgspec.to_builtins(maintainer.advice)


async def _asked(ask: Callable[[], Any], told: Callable[[RillflowError], Exception]) -> dict[str, Any]:
    try:
        outcome: Outcome = await ask()
    except RillflowError as error:
        raise told(error) from None
    return dict(msgspec.to_builtins(outcome))


# ---------------------------------------------------------------- serving


async def serve_stdio(maintainer: Maintainer) -> None:
    """Serve until the client disconnects, or the run and its nodes have ended."""
    serving = asyncio.create_task(build_server(maintainer).run_stdio_async())
    try:
        await _with_upkeep(maintainer, serving)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def serve_http(maintainer: Maintainer, token: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve on loopback until the run and its nodes have ended. `on_ready` gets the URL."""
    app = build_server(maintainer).streamable_http_app(stateless_http=True, json_response=True)
    async with served(app, token, port, what="the MCP server") as (url, serving):
        on_ready(f"{url}/mcp")
        await _with_upkeep(maintainer, serving)


async def _with_upkeep(maintainer: Maintainer, serving: asyncio.Task[None]) -> None:
    """Keep up the nodes while clients are served, until either ends."""
    upkeep = asyncio.create_task(maintainer.run())
    try:
        done, _ = await asyncio.wait((serving, upkeep), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)
