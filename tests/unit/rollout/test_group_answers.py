"""With a reward of the whole group a node leaves each answer where the dataflow service will read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_support import World

from rillflow.agents.rewards.base import Sum
from rillflow.contracts import Episode
from rillflow.rollout.rewards import RewardRules

GROUPED = RewardRules(grouped=True)


async def says(episode: Episode) -> Any:
    said = await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    return {"text": said.text}


async def rewards_an_answer(episode: Episode) -> Any:
    said = await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    episode.reward(1.0, call=said.call)
    return said.text


async def returns_an_object(episode: Episode) -> Any:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    return object()


async def test_the_answer_lies_beside_the_transcript(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=says, reward=Sum([]), rules=GROUPED) as world:
        await world.dataflow.until(1)
        (done,) = world.dataflow.done
        (columns,) = world.unit.get([done.samples[0].row], ["transcript", "answer"])
    assert done.reward == 0.0
    assert "role_reward/agent" not in done.metrics
    assert json.loads(bytes(columns["answer"])) == {"text": "7 7"}
    assert json.loads(bytes(columns["transcript"]))[0]["messages"][0]["content"] == "hello"


async def test_without_one_no_answer_is_kept(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=says, reward=Sum([])) as world:
        await world.dataflow.until(1)
        (columns,) = world.unit.get([world.dataflow.done[0].samples[0].row], ["transcript", "answer"])
    assert set(columns) == {"transcript"}


async def test_rewards_of_single_answers_are_refused(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=rewards_an_answer, reward=Sum([]), rules=GROUPED) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert "compares whole episodes of a group" in failed.error


async def test_an_answer_that_cannot_travel_is_said(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=returns_an_object, reward=Sum([]), rules=GROUPED) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert failed.cause == "reward_error"
    assert "a object and cannot be written as JSON" in failed.error
