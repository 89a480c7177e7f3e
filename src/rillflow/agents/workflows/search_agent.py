"""Search and answer in plain text, for models without tool calls.

    model        … <search>who directed The Half-Way Girl</search>
    user         <information>[1] The Half-Way Girl: …</information>
    model        … <answer>New York</answer>

Each answer of the model ends with its tag. Search results come as messages of the user, so they are never trained.
Options: `turns` (most model calls, default 4), `tool` (the recipe's tool that searches, default search), `instructions`
(the text before the question).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rillflow.contracts import Episode

TURNS = 4
INSTRUCTIONS = (
    "Answer the question. You may look things up first: write <search>what you look for</search> and stop; what is "
    "found comes between <information> and </information>. Search as often as you need to. When you know the answer, "
    "write it, as short as you can, as <answer>the answer</answer>."
)
WRONG = "Write either <search>what you look for</search> or <answer>the answer</answer>."
LAST = "This was the last search: now write <answer>the answer</answer>."
_STOPS = ["</search>", "</answer>"]
# The closing tag is the stop string, which clients do not see.
_ACTION = re.compile(r"<(search|answer)>((?:(?!<search>|<answer>).)*?)(?:</\1>|\Z)", re.DOTALL)


class Action(NamedTuple):
    """An action of the model."""

    kind: Literal["search", "answer"]
    text: str


async def play(episode: Episode) -> str | None:
    """Return the text of the answer, or None; rewards such as `exact_match` and `f1` take it."""
    agent = episode.role("agent")
    turns = episode.options.get("turns", TURNS)
    instructions = episode.options.get("instructions", INSTRUCTIONS)
    question = f"{instructions}\n\nQuestion: {episode.payload['question']}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for turn in range(turns):
        said = await agent.ask(messages, stop=_STOPS)
        action = read(said.text)
        if action is not None and action.kind == "answer":
            return action.text
        reply = WRONG if action is None else await _searched(episode, action.text)
        if turn == turns - 2:
            reply = f"{reply}\n{LAST}"
        messages += [said.message, {"role": "user", "content": reply}]
    return None


def read(text: str) -> Action | None:
    """Return the first action of a text; whatever the model writes after it is ignored."""
    found = _ACTION.search(text)
    if found is None or not found[2].strip():
        return None
    kind: Literal["search", "answer"] = "search" if found[1] == "search" else "answer"
    return Action(kind, found[2].strip())


async def _searched(episode: Episode, query: str) -> str:
    found = await episode.tools.call(episode.options.get("tool", "search"), {"query": query}, episode)
    return f"<information>{found}</information>"
