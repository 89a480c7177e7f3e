"""The tools of a recipe: they are opened together, their arguments are checked, and their calls have deadlines.

Invariants: every call is answered with text, which begins with `error: ` if the call was wrong. A text is never longer
than the tool's bound. A failure that is not the model's fault (a sandbox or a tool's server is gone) is raised, so the
episode is played again and never rewarded for it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rillflow.agents.options import read_options
from rillflow.agents.tools.functions import tool_of
from rillflow.config import ToolConfig, resolve_object
from rillflow.config.tracebacks import UserErrors, located, place_of
from rillflow.contracts import Episode, Tool
from rillflow.errors import ConfigError, RillflowError, ToolError, did_you_mean
from rillflow.types import SLOW_TOOL, UserError

log = logging.getLogger(__name__)

MAX_ARGUMENTS = 1 << 16  # characters that a model may write
MAX_OUTPUT = 8192  # characters that it may read, if the recipe sets no other bound
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what every chat API accepts
Opener = Callable[[float, AsyncExitStack], Awaitable[Tool]]

# The shipped tools: each is a Section of its options with `open`. Only tools that a recipe names are imported.
TOOLS: dict[str, str] = {
    "calculator": "rillflow.agents.tools.calculator:Calculator",
    "python": "rillflow.agents.tools.python:Python",
    "search": "rillflow.agents.tools.corpus:Search",
    "web_search": "rillflow.agents.tools.web_search:WebSearch",
}


class OpenToolbox:
    """A Toolbox whose tools are open until `close`. `outputs` holds the length bounds of single tools; `errors`
    collects what tools raise."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        outputs: Mapping[str, int] | None = None,
        on_close: Callable[[], Awaitable[object]] | None = None,
        errors: UserErrors | None = None,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._errors = errors or UserErrors()
        self._outputs = dict(outputs or {})
        self._on_close = on_close
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"tools: two of them have the name {twice}", "leave one out; `only` chooses a server's tools"
            )
        for name in self._tools:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"tools: {name!r:.100} is not a valid name", "letters, digits, _ and -, at most 64")

    @property
    def schemas(self) -> list[Any]:
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in self._tools.values()
        ]

    def names(self) -> Sequence[str]:
        return list(self._tools)

    async def call(self, name: str, arguments: str | Mapping[str, Any], episode: Episode | None = None) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name:.100}; there are: {', '.join(self._tools) or 'none'}"
        try:
            text = await _answer(tool, _parsed(arguments, tool.parameters), episode)
        except _TooLate as error:
            log.warning("tool %s took longer than %.3g s%s", name, error.seconds, self._note_late(name, error))
            text = f"error: {name} took longer than {error.seconds:.3g} s"
        except ToolError as error:
            text = f"error: {error.message}"
        except RillflowError:
            raise
        except Exception as error:
            # The arguments may be the reason, so the model reads the error; a bug of the tool is reported as well.
            log.warning("tool %s raised %s%s", name, located(error), self._errors.note(f"tool {name}", error))
            text = f"error: {type(error).__name__}: {error}"
        return _bounded(text, self._outputs.get(name, MAX_OUTPUT))

    def _note_late(self, name: str, late: _TooLate) -> str:
        """Record where the tool hung and return the place for the log."""
        place = place_of(late)
        told = f" ({place})" if place else ""
        error = f"{name} took longer than {late.seconds:.3g} s{told}"
        self._errors.add([UserError(kind=f"{SLOW_TOOL}{name}", where=place, error=error)])
        return told

    async def close(self) -> None:
        if self._on_close is not None:
            await self._on_close()


async def open_toolbox(tools: Sequence[ToolConfig], errors: UserErrors | None = None) -> OpenToolbox:
    """Open the tools of a recipe. A ConfigError names the tool that cannot be opened and leaves none open."""
    opened: list[Tool] = []
    outputs: dict[str, int] = {}
    stack = AsyncExitStack()
    try:
        for config in tools:
            found = await _open(config, stack)
            opened += found
            outputs |= {tool.name: config.output for tool in found}
        return OpenToolbox(opened, outputs=outputs, on_close=stack.aclose, errors=errors)
    except BaseException:
        await stack.aclose()
        raise


def check_tools(tools: Sequence[ToolConfig]) -> None:
    """Raise ConfigError for faults that can be found without opening the tools."""
    for config in tools:
        if config.name is not None:
            opener_of(config.name, config.options)
        elif config.function is not None:
            tool_of(resolve_object(config.function))


def opener_of(name: str, options: Mapping[str, Any]) -> Opener:
    """Return a function that opens a shipped tool with a timeout and pushes what must be closed onto the stack."""
    if name not in TOOLS:
        raise ConfigError(
            f"there is no tool {name!r}",
            f"{did_you_mean(name, TOOLS)}there are {', '.join(TOOLS)}; yours is module:function",
        )
    module, _, attribute = TOOLS[name].partition(":")
    section = getattr(importlib.import_module(module), attribute)
    opener: Opener = read_options(f"tool {name}", options, section).open
    return opener


async def _open(config: ToolConfig, stack: AsyncExitStack) -> Sequence[Tool]:
    if config.function is not None:
        return [tool_of(resolve_object(config.function), timeout=config.timeout)]
    if config.name is not None:
        return [await opener_of(config.name, config.options)(config.timeout, stack)]
    from rillflow.agents.tools.mcp_tools import McpServer  # `mcp` is an extra

    assert config.mcp is not None
    server = McpServer(config.mcp, timeout=config.timeout)
    stack.push_async_callback(server.close)
    return await server.open()


def _parsed(arguments: str | Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments as a mapping with all required names and no unknown ones."""
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS:
            raise ToolError(f"the arguments are longer than {MAX_ARGUMENTS} characters")
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ToolError("the arguments are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise ToolError("the arguments are not an object")
    known, free = parameters.get("properties") or {}, parameters.get("additionalProperties", False)
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    unknown = [str(name) for name in arguments if name not in known] if known and free is False else []
    if missing:
        raise ToolError(f"{', '.join(missing)}: missing; the arguments are: {', '.join(known)}")
    if unknown:
        raise ToolError(f"{unknown[0]:.100}: unknown; the arguments are: {', '.join(known)}")
    return arguments


async def _answer(tool: Tool, arguments: Mapping[str, Any], episode: Episode | None) -> str:
    seconds = tool.timeout if episode is None else min(tool.timeout, episode.seconds_left())
    try:
        async with asyncio.timeout(seconds):
            return await tool.call(arguments, episode)
    except TimeoutError as error:
        # Its traceback shows where the tool hung. Python 3.11.2 and older have it as the context alone.
        cancelled = error.__cause__ or error.__context__
        raise _TooLate(seconds).with_traceback(cancelled.__traceback__ if cancelled else None) from None


class _TooLate(Exception):
    """A tool did not answer within `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def _bounded(text: str, limit: int) -> str:
    """Return text that every client can send: bounded, and without lone surrogates."""
    if len(text) > limit:
        text = f"{text[:limit]}\n… ({len(text) - limit} characters more)"
    return text.encode(errors="replace").decode()
