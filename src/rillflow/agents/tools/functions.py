"""A typed function is a tool: its annotations are the schema of its arguments, its docstring is what the model reads.

    async def count(box: str, item: str, episode: Episode) -> int:
        '''Count the pieces of one item in one box.'''

`episode` is given by the toolbox and not shown. Plain functions run in threads, of which each tool has a bounded
number: one that hangs past its deadline keeps its thread, and holds up nothing but calls of the same tool.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import to_json

from rillflow.contracts import Episode
from rillflow.errors import ConfigError, ToolError
from rillflow.wire import in_daemon

THREADS = 32  # of one tool, those that hang among them
EPISODE = "episode"
_ARGUMENT_LINE = re.compile(r"\s+(\w+)(?: \([^)]*\))?:\s+(.+)")
_SHOWN = 4  # of what is wrong with the arguments of a call


class FunctionTool:
    """A Tool made of a function."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout: float = 10.0) -> None:
        self.name: str = name or function.__name__
        self.timeout = timeout
        self.description, notes = _documentation(function)
        self._function = function
        self._model, self._episode = _model_of(function, self.name, notes)
        self.parameters: Mapping[str, Any] = tidy(self._model.model_json_schema())
        self._threads = asyncio.Semaphore(THREADS)

    async def call(self, arguments: Mapping[str, Any], episode: Episode | None) -> str:
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(_wrong(error)) from None
        given = {name: getattr(checked, name) for name in self._model.model_fields}
        if self._episode is not None:
            if episode is None and self._episode.default is inspect.Parameter.empty:
                raise ToolError(f"{self.name} works only within an episode")
            given[EPISODE] = episode
        if inspect.iscoroutinefunction(self._function):
            return _text(await self._function(**given))
        return _text(await self._in_thread(given))

    async def _in_thread(self, given: Mapping[str, Any]) -> Any:
        await self._threads.acquire()
        return await in_daemon(
            partial(self._function, **given),
            f"tool-{self.name}",
            exited=lambda error: ToolError(f"{self.name} raised {type(error).__name__}"),
            ended=self._threads.release,
        )


def tool_of(function: Callable[..., Any], *, name: str | None = None, timeout: float = 10.0) -> FunctionTool:
    """ConfigError where the function's signature cannot be a schema."""
    return FunctionTool(function, name=name, timeout=timeout)


def tidy(schema: Any) -> Any:
    """A schema without what costs tokens and tells a model nothing: titles, and that nothing else is taken."""
    if isinstance(schema, list):
        return [tidy(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]
    first = [key for key in ("type", "properties", "required") if key in kept]
    order = [*first, *(key for key in kept if key not in first)]
    # Names of properties are the tool's own, whatever they are called.
    return {
        key: {name: tidy(inner) for name, inner in kept[key].items()}
        if key in ("properties", "$defs")
        else tidy(kept[key])
        for key in order
    }


def _model_of(
    function: Callable[..., Any], name: str, notes: Mapping[str, str]
) -> tuple[type[BaseModel], inspect.Parameter | None]:
    """A model of the arguments that models write, and the parameter that takes the episode, if there is one."""
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tool {name}: {error}", "a tool is a function with annotations that can be read") from None
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.name == EPISODE:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name}: {parameter} has no name for models", "give each argument a name")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: {parameter.name} has no type", f"write {parameter.name}: str, or another")
        default = ... if parameter.default is parameter.empty else parameter.default
        # What stands in the annotation goes before what stands in the docstring.
        about = Field(default, description=notes[parameter.name]) if parameter.name in notes else default
        fields[parameter.name] = (hints[parameter.name], about)
    try:
        made: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        made.model_json_schema()
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {name}: {error}", "use types that JSON has, or pydantic models of them") from None
    return made, parameters.get(EPISODE)


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The docstring up to its `Args:`, and what is said there of each argument."""
    about, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    notes: dict[str, str] = {}
    for line in arguments.splitlines():
        if line and not line.startswith(" "):
            break
        if found := _ARGUMENT_LINE.fullmatch(line):
            notes[found[1]] = found[2]
    return " ".join(about.split()), notes


def _wrong(error: ValidationError) -> str:
    items = error.errors(include_url=False, include_input=False)[:_SHOWN]
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in items)


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return "" if result is None else to_json(result, fallback=str).decode()
