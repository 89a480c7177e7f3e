"""The examples of docs/workflows.md, played as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.rollout.episode import Surroundings
from scripted_play import play_scripted

PAGE = Path(__file__).parents[3] / "docs" / "workflows.md"
PAYLOAD = {"question": "What is 2 + 2?", "answer": "4"}


def example(heading: str) -> dict[str, Any]:
    """Return the names that the first Python block below a heading defines."""
    section = PAGE.read_text().split(f"# {heading}\n", 1)[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    defined: dict[str, Any] = {"asyncio": asyncio}
    exec(found[1], defined)
    return defined


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_one_call() -> None:
    played = await play_scripted(example("Workflows")["play"], PAYLOAD, ["4"], Surroundings())
    assert played.answer == "4"


async def test_several_turns_with_tools() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    place = Surroundings(tools=OpenToolbox([tool_of(add)]))
    played = await play_scripted(example("Several turns with tools")["play"], PAYLOAD, [call, "It is 4"], place)
    assert played.answer == "It is 4"
    assert "<tool_response>4</tool_response>" in played.engine.asked[1]
    assert len(played.samples) == 1


async def test_several_roles() -> None:
    play = example("Several roles, one policy or several")["play"]
    played = await play_scripted(play, PAYLOAD, ["4", "no"], Surroundings())
    # Two conversations, each with the reward of its own answer.
    assert {sample.agent for sample in played.samples} == {"solver", "checker"}
    given = {sample.agent: float(sample.columns["rewards"][-1]) for sample in played.samples}
    assert given == {"solver": 1.0, "checker": 0.0}


async def test_subagents() -> None:
    defined = example("Workflows in workflows, subagents")

    async def plan(episode: Any) -> list[str]:
        return ["the whole"]

    async def join(episode: Any, parts: list[str]) -> str:
        return "+".join(parts)

    defined |= {"plan": plan, "join": join}
    texts = ["SPLIT\nfirst\nsecond", "one", "two"]
    played = await play_scripted(defined["play"], PAYLOAD, texts, Surroundings())
    assert sorted(played.answer) == sorted("onetwo")
    assert len(played.samples) == 3
