"""Tools by name. A shipped tool is a Section of its options with `open`; adding one touches only this table."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from pydantic import ValidationError

from rillflow.contracts import Tool
from rillflow.errors import ConfigError, did_you_mean

Opener = Callable[[float, AsyncExitStack], Awaitable[Tool]]

# By reference: no tool is imported that no recipe names.
TOOLS: dict[str, str] = {
    "calculator": "rillflow.agents.tools.calculator:Calculator",
    "python": "rillflow.agents.tools.python:Python",
    "search": "rillflow.agents.tools.search:Search",
    "web_search": "rillflow.agents.tools.web_search:WebSearch",
}


def opener_of(name: str, options: Mapping[str, Any]) -> Opener:
    """What opens the tool with a timeout; it may leave things for the stack to close. ConfigError for wrong options."""
    if name not in TOOLS:
        raise ConfigError(
            f"there is no tool {name!r}",
            f"{did_you_mean(name, TOOLS)}there are {', '.join(TOOLS)}; yours is module:function",
        )
    module, _, attribute = TOOLS[name].partition(":")
    section = getattr(importlib.import_module(module), attribute)
    try:
        opener: Opener = section.model_validate(dict(options)).open
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        valid = ", ".join(section.model_fields) or "none"
        raise ConfigError(f"tool {name}: {wrong}", f"its options are: {valid}") from None
    return opener
