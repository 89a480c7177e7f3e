"""A question and tools: the model calls tools until it answers, within its turns.

Options: `system` (a system message), `turns` (model calls at most, default 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rillflow.agents.roles import answer_uses

if TYPE_CHECKING:
    from rillflow.contracts import Episode

TURNS = 4


async def play(episode: Episode) -> str | None:
    """Ask the prompt's `question`, serve the tool calls, and return the answer, or None if the turns end without one.

    Results of tools are part of the next call's prompt and are not trained.
    """
    agent = episode.role("agent")
    messages: list[dict[str, Any]] = [{"role": "user", "content": episode.payload["question"]}]
    if system := episode.options.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    for _ in range(episode.options.get("turns", TURNS)):
        said = await agent.ask(messages, tools=episode.tools.schemas)
        if not said.uses:
            return said.text
        messages += [said.message, *await answer_uses(episode, said)]
    return None
