"""A reward of an answer is that of the sample which holds it; several in one sample are trained as the recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_support import World, task

from rillflow.contracts import Episode
from rillflow.rollout.rewards import RewardRules


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def solver_and_checker(episode: Episode) -> None:
    """Both are played by one policy; the solver is wrong, the checker says so."""
    solved = await episode.role("solver").ask(user("solve it"))
    verdict = await episode.role("checker").ask(user("is it right?"))
    episode.reward(0.0, call=solved.call)
    episode.reward(1.0, call=verdict.call)


async def two_turns(episode: Episode) -> float:
    """One conversation, so one sample, with two rewarded answers."""
    first = await episode.role("agent").ask(user("hello"))
    second = await episode.role("agent").ask([*user("hello"), first.message, *user("go on")])
    episode.reward(0.5, call=first.call)
    episode.reward(0.25, call=second.call)
    return 1.0


async def test_roles_that_share_a_policy_keep_their_own_rewards(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=solver_and_checker) as world:
        await world.dataflow.until(1)
    (done,) = world.dataflow.done
    assert [(sample.agent, sample.reward) for sample in done.samples] == [("solver", 0.0), ("checker", 1.0)]
    assert done.reward == 0.5
    assert (done.metrics["role_reward/solver"], done.metrics["role_reward/checker"]) == (0.0, 1.0)


async def test_answers_to_one_prompt_have_a_reward_each(tmp_path: Path) -> None:
    async def drafts(episode: Episode) -> float:
        for place, said in enumerate(await episode.role("agent").ask_many(user("hello"), 3)):
            episode.reward(float(place), call=said.call)
        return 0.0

    async with World(tmp_path, 1, workflow=drafts) as world:
        await world.dataflow.until(1)
    (done,) = world.dataflow.done
    assert [sample.reward for sample in done.samples] == [0.0, 1.0, 2.0]
    assert (done.reward, done.metrics["role_reward/agent"]) == (0.0, 1.0)


async def test_several_rewarded_answers_of_a_sample_need_a_word_of_the_recipe(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=two_turns) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert failed.cause == "reward_error"
    assert "holds 2 answers with a reward" in failed.error
    assert "trainer.step_rewards" in failed.error


@pytest.mark.parametrize("how", ["sum", "own", "to_go"])
async def test_several_rewarded_answers_of_a_sample_as_the_recipe_says(tmp_path: Path, how: str) -> None:
    async with World(tmp_path, 1, workflow=two_turns, rules=RewardRules(steps={"agent": how})) as world:
        await world.dataflow.until(1)
        (done,) = world.dataflow.done
        (columns,) = world.unit.get([done.samples[0].row], ["rewards"])
    assert (done.reward, [sample.reward for sample in done.samples]) == (1.0, [0.75])
    column = np.frombuffer(columns["rewards"], "<f4")
    assert column[~np.isnan(column)].tolist() == [0.5, 0.25]


async def test_an_evaluation_needs_no_word_about_training(tmp_path: Path) -> None:
    asked = [msgspec.structs.replace(task(), lane="eval")]
    async with World(tmp_path, asked, workflow=two_turns) as world:
        await world.dataflow.until(1)
    assert [done.reward for done in world.dataflow.done] == [1.0]


async def one_of_two(episode: Episode) -> None:
    said = await episode.role("solver").ask(user("solve it"))
    await episode.role("checker").ask(user("is it right?"))
    episode.reward(1.0, call=said.call)


async def leaf_and_answer(episode: Episode) -> None:
    said = await episode.role("solver").ask(user("solve it"))
    episode.reward(1.0, call=said.call)
    episode.reward(0.5, leaf=0)


async def outcome_alone(episode: Episode) -> float:
    await episode.role("solver").ask(user("solve it"))
    return 1.0


@pytest.mark.parametrize(
    ("workflow", "steps", "error"),
    [
        (one_of_two, None, "1 of 2 samples of policy 'agent' have no reward"),
        (leaf_and_answer, None, "has a reward of its leaf, and its answers have others"),
        (leaf_and_answer, "sum", "has a reward of its leaf, and its answers have others"),
        (outcome_alone, "own", "trainer.step_rewards=own reads no others"),
    ],
)
async def test_rewards_that_are_missing_or_that_nothing_reads(
    tmp_path: Path, workflow: Any, steps: str | None, error: str
) -> None:
    async with World(tmp_path, 1, workflow=workflow, rules=RewardRules(steps={"agent": steps})) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert failed.cause == "reward_error"
    assert error in failed.error


async def test_untrained_roles_need_no_reward(tmp_path: Path) -> None:
    rules = RewardRules(untrained=frozenset({"checker"}))
    async with World(tmp_path, 1, workflow=one_of_two, rules=rules) as world:
        await world.dataflow.until(1)
    assert [done.reward for done in world.dataflow.done] == [1.0]
