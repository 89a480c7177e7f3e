"""The executor: pure dispatch of a decision to a tool. It calls no model and keeps no state.

What a model wrote wrong is told in the result, from `error: ` on; only tools that cannot be reached raise, as the
toolbox does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rillflow.agents.agentflow.actions import ANSWER, THINK, Decision
from rillflow.contracts import Episode
from rillflow.errors import ConfigError


class Executor:
    """`tools` names the tool of each action; an action without one is echoed (think, answer)."""

    def __init__(self, episode: Episode, tools: Mapping[str, str]) -> None:
        self._episode = episode
        self._tools = tools
        self._only = {schema["function"]["name"]: _only_argument(schema) for schema in episode.tools.schemas}

    async def execute(self, decision: Decision) -> str:
        tool = self._tools.get(decision.action)
        if tool is None:
            return decision.action_input
        argument = self._only.get(tool)
        arguments = decision.action_input if argument is None else {argument: decision.action_input}
        return await self._episode.tools.call(tool, arguments, self._episode)


def tools_of(episode: Episode, actions: Mapping[str, str] | None) -> dict[str, str]:
    """The tool of each action: as the recipe says, or every tool by its own name. ConfigError where there is none."""
    names = list(episode.tools.names())
    chosen = dict(actions) if actions is not None else {name: name for name in names}
    for action, tool in chosen.items():
        if action in (THINK, ANSWER):
            raise ConfigError(f"options.actions: {action} needs no tool", "leave it out: it is always there")
        if tool not in names:
            raise ConfigError(f"options.actions: there is no tool {tool}", f"`tools` has: {', '.join(names) or 'none'}")
    return chosen


def _only_argument(schema: Mapping[str, Any]) -> str | None:
    """The argument that the action's input is, as it stands; None: the input is the arguments as JSON."""
    parameters = schema["function"].get("parameters") or {}
    known, required = parameters.get("properties") or {}, list(parameters.get("required") or ())
    texts = [name for name in (required or known) if known.get(name, {}).get("type") == "string"]
    return texts[0] if len(texts) == 1 and len(required) <= 1 else None
