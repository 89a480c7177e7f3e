"""A node with two policies: real engines, gateway and storage unit; only the dataflow service is imitated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_support import World

from rillflow.config import PolicyConfig
from rillflow.contracts import Episode
from rillflow.engine.build import build_engine
from rillflow.examples import stockroom
from rillflow.examples.stockroom import play_checked as checked
from rillflow.types import Prompt, Task
from tiny_policy import tiny_tokenizer

POLICIES = ("solver", "checker")


async def played(workflow: Any, folder: Path, count: int) -> World:
    """The end of `count` episodes."""
    prompts = stockroom.prompts("train", count, 1)
    tasks = [
        Task(id=f"g.{n}", prompt=Prompt(**row), group="g", place=n, lane="train", seed=n)
        for n, row in enumerate(prompts)
    ]
    policy = PolicyConfig.model_validate({"model": "tiny", "engine": {"slots": 8, "context": 160}})
    engines = {name: build_engine(policy, exact=False) for name in POLICIES}
    for engine in engines.values():
        await engine.start()
    try:
        async with World(folder, tasks, workflow=workflow, policies=POLICIES, sources=engines, episodes=16) as world:
            await world.dataflow.until(count)
            await world.end()
    finally:
        for engine in engines.values():
            await engine.close()
    return world


async def test_each_policy_has_samples_and_rewards_of_its_own(tmp_path: Path) -> None:
    """And the shipped policy does judge: its verdicts are words, mostly yes or no."""
    world = await played(checked, tmp_path, 16)
    assert not world.dataflow.failed
    tokenizer, verdicts = tiny_tokenizer(), []
    for done in world.dataflow.done:
        solver = [sample for sample in done.samples if sample.policy == "solver"]
        (checker,) = [sample for sample in done.samples if sample.policy == "checker"]
        assert solver
        assert {sample.reward for sample in solver} == {done.reward}
        (columns,) = world.unit.get([checker.row], ["tokens", "mask"])
        ids = memoryview(columns["tokens"]).cast("i").tolist()
        said = [token for token, trained in zip(ids, columns["mask"], strict=True) if trained]
        verdict = str(tokenizer.decode(said, skip_special_tokens=True)).strip()
        verdicts.append(verdict)
        assert checker.reward == float(verdict == ("yes" if done.reward else "no"))
    assert len(world.dataflow.done) == 16
    assert sum(verdict in ("yes", "no") for verdict in verdicts) >= 12
    assert len({done.reward for done in world.dataflow.done}) == 2


async def test_a_policy_without_a_reward_fails_the_episode(tmp_path: Path) -> None:
    async def forgetful(episode: Episode) -> dict[str, float]:
        await checked(episode)
        return {"solver": 1.0}

    dataflow = (await played(forgetful, tmp_path, 2)).dataflow
    assert not dataflow.done
    assert [news.cause for news in dataflow.failed] == ["reward_error"] * 2
    assert "WorkflowError: the episode sampled from checker" in dataflow.failed[0].error


async def test_one_number_rewards_all_policies(tmp_path: Path) -> None:
    async def shared(episode: Episode) -> float:
        await checked(episode)
        return 0.5

    dataflow = (await played(shared, tmp_path, 2)).dataflow
    assert {sample.reward for done in dataflow.done for sample in done.samples} == {0.5}
