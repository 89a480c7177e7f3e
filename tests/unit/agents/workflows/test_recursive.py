"""The recursive agent: concurrent helpers, a shared notebook, and bounds that are reported, not raised."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import openai
import pytest

from rillflow.agents.workflows.recursive import NOBODY, play
from team_play import TeamPlayed, play_team

PAYLOAD = {"question": "all", "answer": "7"}
OPTIONS: dict[str, Any] = {
    "check": "rillflow.examples.digits:reward",
    "prompts": {"tag": "task:{question}{notes}", "tool": "task:{question}{notes}"},
}


async def played(say: Any, **options: Any) -> TeamPlayed:
    steps = "own" if options.get("credit") == "answers" else None
    return await play_team(play, PAYLOAD, {"agent": say}, options=OPTIONS | options, steps=steps)


def task_of(asked: str) -> str:
    return re.findall(r"task:(\w+)", asked)[-1]


async def test_helpers_work_at_once_and_their_results_come_back_in_order() -> None:
    both = asyncio.Barrier(2)

    async def say(asked: str) -> str:
        if task_of(asked) == "all" and "<result>" not in asked:
            return "<ask>left</ask> and <ask>right</ask>"
        if task_of(asked) == "all":
            assert "<result>left done</result><result>right done</result>" in asked
            return "<answer>7</answer>"
        async with asyncio.timeout(30):
            await both.wait()  # neither answers before the other was asked
        if task_of(asked) == "left":
            await asyncio.sleep(0)
        return f"<answer>{task_of(asked)} done</answer>"

    episode = await played(say)
    assert episode.reward == 1.0
    assert [one.reward for one in episode.samples] == [1.0] * 3, "three agents, a sample each, the outcome to all"
    assert episode.metrics == {"agents": 3.0, "notes": 0.0}
    assert "rewards" not in episode.record.samples("agent")[0].columns


async def test_notes_are_read_by_all_who_come_later() -> None:
    async def say(asked: str) -> str:
        if task_of(asked) == "all" and "<result>" not in asked:
            return "<note>mind the gap</note><ask>left</ask>"
        if task_of(asked) == "left":
            assert asked.count("<note>mind the gap</note>") == 1
            return "<note>it is 7</note><answer>done</answer>"
        assert asked.count("<note>it is 7</note>") == 1
        return "<answer>7</answer>"

    episode = await played(say)
    assert episode.reward == 1.0
    assert episode.metrics["notes"] == 2.0


@pytest.mark.parametrize(("bounds", "agents"), [({"depth": 0}, 1), ({"depth": 2}, 3), ({"depth": 9, "agents": 2}, 2)])
async def test_the_bounds_are_told(bounds: dict[str, int], agents: int) -> None:
    refused = 0

    async def say(asked: str) -> str:
        nonlocal refused
        if NOBODY in asked:
            refused += 1
        return "<answer>7</answer>" if "<result>" in asked else "<ask>more</ask>"

    episode = await played(say, **bounds)
    assert (episode.metrics["agents"], refused, episode.reward) == (agents, 1, 1.0)


async def test_who_never_answers_is_stopped() -> None:
    async def say(asked: str) -> str:
        return "<note>x</note>"

    episode = await played(say, turns=3, notes=2, credit="answers")
    assert episode.reward == 0.0
    assert episode.record.calls == 3
    assert episode.metrics["notes"] == 2.0


async def test_credit_of_answers() -> None:
    """Each answer that was of use is worth the outcome, for algorithms that take rewards of steps."""

    async def say(asked: str) -> str:
        if task_of(asked) == "left":
            return "hm"
        return "<answer>7</answer>" if "<result>" in asked else "<ask>left</ask>"

    episode = await played(say, credit="answers")
    rewards = [
        [float(value) for value in sample.columns["rewards"] if not math.isnan(value)]
        for sample in episode.record.samples("agent")
    ]
    assert sorted(rewards) == [[0.0], [1.0, 1.0]]
    assert sorted(one.reward for one in episode.samples) == [0.0, 2.0]


async def test_by_tool() -> None:
    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    async def say(asked: str) -> str:
        if task_of(asked) == "left":
            assert "<note>mind</note>" in asked
            return "left done"
        if "<tool_response>" not in asked:
            return call("note", text="mind")
        if "left done" not in asked:
            return call("delegate", task="left") + call("delegate", wrong=1) + call("nothing")
        assert "error: delegate takes" in asked
        assert "error" in asked.rpartition("delegate takes")[2]
        return "7"

    episode = await played(say, by="tool")
    assert episode.reward == 1.0
    assert len(episode.samples) == 2


async def test_the_first_failure_of_a_helper_is_the_episodes() -> None:
    async def say(asked: str) -> str:
        return "<ask>" + "long " * 5000 + "</ask><ask>left</ask>" if task_of(asked) == "all" else "<answer>1</answer>"

    with pytest.raises(openai.BadRequestError, match="context"):
        await played(say)
