"""Tools made from typed functions: the annotations are the schema of the arguments, the docstring is the description.

Plain functions run in threads. Each tool has a bounded number of them: a call that hangs past its deadline keeps its
thread and delays only calls of the same tool.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import to_json

from rillflow.contracts import Episode
from rillflow.errors import ConfigError, ToolError
from rillflow.wire import in_daemon

THREADS = 32  # of one tool, including those that hang
EPISODE = "episode"
_FACTS = "__rillflow_tool__"  # the attribute of a function that `tool` has decorated
_ARGUMENT_LINE = re.compile(r"\s+(\w+)(?: \([^)]*\))?:\s+(.+)")
_SHOWN = 4  # faults of a call's arguments that are listed
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@overload
def tool(function: FunctionT) -> FunctionT: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[FunctionT], FunctionT]: ...
def tool(function: Any = None, *, name: str | None = None, description: str | None = None) -> Any:
    """Declare a function to be a tool that models may call, and check its signature at once.

    The annotations are the schema of the arguments; the docstring is the description, with its `Args:` for single
    arguments. `name` and `description` replace the function's own. A parameter `episode` is given by Rillflow and
    hidden from the model. A ToolError that the function raises is for the model to read. The function stays callable as
    before; a recipe lists it under `tools` as `file.py:count`.

    Example:

        @rillflow.tool
        async def count(box: str, item: str, episode: rillflow.Episode) -> int:
            '''Count the pieces of one item in one box.'''
            return episode.payload["stock"][box][item]
    """

    def declare(function: FunctionT) -> FunctionT:
        setattr(function, _FACTS, {"name": name, "description": description})
        FunctionTool(function)  # raises ConfigError where it cannot be a tool
        return function

    return declare if function is None else declare(function)


class FunctionTool:
    """A tool made from a function."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout: float = 10.0) -> None:
        declared = getattr(function, _FACTS, {})
        self.name: str = name or declared.get("name") or function.__name__
        self.timeout = timeout
        documented, notes = _documentation(function)
        self.description: str = declared.get("description") or documented
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
    """Return the function as a tool; ConfigError if its signature cannot be a schema."""
    return FunctionTool(function, name=name, timeout=timeout)


def tidy(schema: Any) -> Any:
    """Return a schema without titles and `additionalProperties: false`, which cost tokens and help no model."""
    if isinstance(schema, list):
        return [tidy(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]
    first = [key for key in ("type", "properties", "required") if key in kept]
    order = [*first, *(key for key in kept if key not in first)]
    # The keys below are the names of the tool's own properties, not keywords of the schema.
    return {
        key: {name: tidy(inner) for name, inner in kept[key].items()}
        if key in ("properties", "$defs")
        else tidy(kept[key])
        for key in order
    }


def _model_of(
    function: Callable[..., Any], name: str, notes: Mapping[str, str]
) -> tuple[type[BaseModel], inspect.Parameter | None]:
    """Return a pydantic model of the arguments, and the parameter that takes the episode or None."""
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tool {name}: {error}", "annotate each argument of the function with a type") from None
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.name == EPISODE:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name}: {parameter} has no name for models", "give each argument a name")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: {parameter.name} has no type", f"write {parameter.name}: str, or another")
        default = ... if parameter.default is parameter.empty else parameter.default
        # A description in the annotation wins over one in the docstring.
        about = Field(default, description=notes[parameter.name]) if parameter.name in notes else default
        fields[parameter.name] = (hints[parameter.name], about)
    try:
        made: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        made.model_json_schema()
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {name}: {error}", "use types that JSON has, or pydantic models of them") from None
    return made, parameters.get(EPISODE)


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the docstring up to `Args:`, and the description of each argument there."""
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
