"""The tools of an MCP server for agents, and a toolbox as an MCP server.

The client: each node has one session with a server, which its episodes share and which is restarted if it dies.
Invariants: a call that the death of the server interrupted is repeated only if the server declares the tool read-only
or idempotent; otherwise, and if the server does not come back, EnvironmentLost fails the episode, which is played
again. Arguments in `fill` come from the prompt's payload: models neither see nor set them.

Not protected against: a server that sends a huge answer, which is read whole before it is cut; a server that does not
end when its standard input closes, which outlives a node that is killed with -9.

The server: over HTTP it serves loopback only, and every call needs a token. A tool that needs an episode answers with
an error, because the server has none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from string import Template
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from rillflow import __version__
from rillflow.agents.command import PASSED, Tail, search_path, words_of
from rillflow.agents.tools.functions import tidy
from rillflow.config import CommandConfig, McpConfig
from rillflow.contracts import Episode, Tool, Toolbox
from rillflow.errors import ConfigError, EnvironmentLost, RillflowError, ToolError
from rillflow.wire.loopback import served

if TYPE_CHECKING:
    from mcp.server import Server

try:
    import httpx2
    import mcp_types as wire
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
except ImportError:
    raise ConfigError("the package `mcp` is not installed", "pip install 'rillflow[mcp]'") from None

log = logging.getLogger(__name__)

OPENING = 60.0  # seconds for a server to start and to list its tools
CALLS = 64  # of one server at once; others wait, within their deadlines
_BACKOFF = (0.0, 0.2, 0.5, 1.0, 2.0)  # seconds before each attempt to reach a server that has gone
_CLOSING = 10.0  # seconds for a session to end; it kills the server earlier
_MOST_TOOLS = 1000
_SHARE = 0.8  # of a call's time that it may wait for a server, so that a lost server is not reported as a slow tool
_ERRORS = 1 << 16  # bytes kept of a server's standard error
_SHOWN = 1000  # characters of it in an error message


class McpTool:
    """One tool of a server. `again` says whether a call may be repeated."""

    def __init__(self, server: McpServer, about: wire.Tool, fill: Mapping[str, str], timeout: float) -> None:
        hints = about.annotations
        self.name = about.name
        self.description = about.description or about.title or ""
        self.timeout = timeout
        self.parameters: Mapping[str, Any] = _without(tidy(about.input_schema), fill)
        self.again = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        properties = about.input_schema.get("properties") or {}
        self._fill = {name: key for name, key in fill.items() if name in properties}
        self._server = server

    async def call(self, arguments: Mapping[str, Any], episode: Episode | None) -> str:
        given = {name: value for name, value in arguments.items() if name not in self._fill}
        for name, key in self._fill.items():
            if episode is None:
                raise ToolError(f"{self.name} works only within an episode")
            if key not in episode.payload:
                raise ConfigError(f"tool {self.name}: the payload has no {key!r}", f"tools.*.mcp.fill.{name} names it")
            given[name] = episode.payload[key]
        return await self._server.call(self, given)


class McpServer:
    """A server, given by its command or its URL."""

    def __init__(self, config: McpConfig, *, timeout: float = 10.0) -> None:
        self._config = config
        self._timeout = timeout
        self._where = config.url or str(config.command)
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._places = asyncio.Semaphore(CALLS)
        self._retired: set[asyncio.Task[None]] = set()

    async def open(self) -> Sequence[Tool]:
        """Start or reach the server and return its tools; ConfigError if it lacks what `only` or `fill` name."""
        try:
            connection = await self._connected(OPENING)
            async with asyncio.timeout(OPENING):
                found = await connection.tools()
        except TimeoutError:
            raise ConfigError(f"the MCP server {self._where} named no tools within {OPENING:.0f} s", _LOOK) from None
        except EnvironmentLost as error:
            raise ConfigError(error.message, error.hint) from None
        only, fill = self._config.only, self._config.fill
        if missing := sorted(set(only or ()) - {tool.name for tool in found}):
            raise ConfigError(
                f"the MCP server {self._where} has no tool {missing[0]}",
                f"it has: {', '.join(tool.name for tool in found)}",
            )
        chosen = [tool for tool in found if only is None or tool.name in only]
        known = {name for tool in chosen for name in tool.input_schema.get("properties") or {}}
        if unknown := sorted(set(fill) - known):
            raise ConfigError(
                f"fill: no tool of {self._where} has an argument {unknown[0]}", f"there are: {', '.join(sorted(known))}"
            )
        return [McpTool(self, tool, fill, self._timeout) for tool in chosen]

    async def call(self, tool: McpTool, arguments: dict[str, Any]) -> str:
        clock = asyncio.get_running_loop().time
        end = clock() + self._timeout
        async with self._places:
            connection = await self._connected((end - clock()) * _SHARE)
            try:
                return await connection.call(tool.name, arguments)
            except _Lost as lost:
                if not tool.again:
                    self._gone(lost)
            connection = await self._connected((end - clock()) * _SHARE)
            try:
                return await connection.call(tool.name, arguments)
            except _Lost as lost:
                self._gone(lost)

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.stop()
        await asyncio.gather(*self._retired)

    def _gone(self, lost: _Lost) -> NoReturn:
        raise EnvironmentLost(f"the MCP server {self._where} was lost in a call: {lost}", _LOOK) from lost

    async def _connected(self, seconds: float) -> _Connection:
        """Return the live connection. A lost one is replaced, once for all callers that wait for it."""
        if self._connection is not None and not self._connection.lost:
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._connecting)
        except TimeoutError:
            raise EnvironmentLost(
                f"the MCP server {self._where} did not answer within {seconds:.3g} s", _LOOK
            ) from None

    async def _connect(self) -> _Connection:
        old, self._connection = self._connection, None
        if old is not None:  # calls of other episodes may still be answered on it
            log.warning("the MCP server %s was lost: a new session begins", self._where)
            retiring = asyncio.create_task(old.retire(self._timeout))
            self._retired.add(retiring)
            retiring.add_done_callback(self._retired.discard)
        wrong: Exception | None = None
        for pause in _BACKOFF:
            await asyncio.sleep(pause)
            connection = _Connection(self._config)
            try:
                await connection.start()
            except _Lost as error:
                wrong = error
            else:
                self._connection = connection
                return connection
        raise EnvironmentLost(f"the MCP server {self._where} cannot be reached: {wrong}", _LOOK)


_LOOK = "start it by hand and read its output"


class _Lost(Exception):
    """The connection or the server is gone."""


class _Connection:
    """One session with a server. One task enters and leaves it, as its cancel scopes require."""

    def __init__(self, config: McpConfig) -> None:
        self.lost = False
        self._config = config
        self._calls = 0
        self._errors: Tail | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._live())
        try:
            first: set[asyncio.Future[Any]] = {self._ready, self._task}
            await asyncio.wait(first, timeout=OPENING, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.stop()
            raise
        if not self._ready.done() and not self._task.done():
            await self.stop()
            raise _Lost(f"no answer within {OPENING:.0f} s")
        if not self._ready.done():
            self.lost = True
            error = self._task.exception()
            if isinstance(error, ConfigError):
                raise error
            wrote = self._errors.text()[-_SHOWN:].strip() if self._errors is not None else ""
            raise _Lost(f"{_plain(error)}{'; it wrote: ' if wrote else ''}{wrote}")

    async def stop(self) -> None:
        """End the session, and the server if we started it."""
        self.lost = True
        self._stop.set()
        if self._task is None:
            return
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSING)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSING)
        elif not self._task.cancelled():
            self._task.exception()  # errors while closing do not matter

    async def retire(self, seconds: float) -> None:
        """End the session when its calls are answered, at the latest after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        await self.stop()

    async def tools(self) -> list[wire.Tool]:
        found: list[wire.Tool] = []
        cursor: str | None = None
        try:
            while len(found) < _MOST_TOOLS:
                page = await self._ready.result().list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        except MCPError as error:
            raise EnvironmentLost(f"the MCP server does not name its tools: {error}", _LOOK) from error
        return found

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        self._calls += 1
        self._idle.clear()
        try:
            result = await self._ready.result().call_tool(name, arguments)
        except MCPError as error:
            if error.code == wire.CONNECTION_CLOSED or (self._config.url and error.code in _OF_HTTP):
                self.lost = True
                raise _Lost(str(error)) from error
            raise ToolError(error.message) from None
        except RuntimeError as error:  # the session ended before the call began
            self.lost = True
            raise _Lost(str(error)) from error
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
        text = _text(result)
        if result.is_error:
            raise ToolError(text.removeprefix("error: "))
        return text

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(await self._transport(stack)))
            self._ready.set_result(client)
            await self._stop.wait()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        if self._config.url is not None:
            timeout = httpx2.Timeout(OPENING, read=None)  # each call has its own deadline
            headers = filled(self._config.headers, "headers")
            client = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
            return streamable_http_client(self._config.url, http_client=client)
        program, *arguments = words_of(CommandConfig(run=str(self._config.command)))
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment = passed | {"PATH": search_path(os.environ)} | filled(self._config.environment, "environment")
        server = StdioServerParameters(command=program, args=arguments, env=environment)
        self._errors = await stack.enter_async_context(Tail.open(_ERRORS))
        return stdio_client(server, errlog=cast("TextIO", self._errors.write))


# The codes with which a restarted server, or a proxy before it, answers requests of an old session.
_OF_HTTP = (wire.INVALID_REQUEST, wire.INTERNAL_ERROR)


def filled(values: Mapping[str, str], where: str) -> dict[str, str]:
    """Return values with `${NAME}` replaced from the environment, so that recipes hold no keys."""
    try:
        return {name: Template(value).substitute(os.environ) for name, value in values.items()}
    except KeyError as error:
        raise ConfigError(f"tools.*.mcp.{where}: {error.args[0]} is not set", f"export {error.args[0]}=…") from None
    except ValueError as error:
        raise ConfigError(f"tools.*.mcp.{where}: {error}", "write ${NAME}, and $$ for a dollar") from None


def _without(schema: dict[str, Any], hidden: Mapping[str, str]) -> dict[str, Any]:
    properties = {name: inner for name, inner in (schema.get("properties") or {}).items() if name not in hidden}
    required = [name for name in schema.get("required", ()) if name not in hidden]
    return schema | {"properties": properties, **({"required": required} if "required" in schema else {})}


def _text(result: wire.CallToolResult) -> str:
    """Return a result as text for a model; content that is not text becomes its type in brackets."""
    parts = [block.text if isinstance(block, wire.TextContent) else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


def _plain(error: BaseException | None) -> str:
    """Return the first cause of an error that task groups have wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]


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
