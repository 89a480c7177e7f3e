"""Rewards given over HTTP, to sessions and their parts, while an episode runs and after it was played."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from rollout_support import TOKEN, World, call, until

from rillflow.config.rollout import GatewayConfig
from rillflow.contracts import Episode, SystemClock
from rillflow.rollout import rewards as module
from rillflow.rollout.rewards import RewardRules


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.01)


class Warped(SystemClock):
    """The real clock, which a test may set forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


async def silent(episode: Episode) -> None:
    await episode.client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )


async def post(url: str, key: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http,
        http.post(url, json=body) as reply,
    ):
        return reply.status, await reply.json()


async def waiting(world: World, count: int = 1) -> None:
    await until(lambda: world.episodes.waiting >= count)


async def test_an_episode_waits_for_its_reward_aside(tmp_path: Path) -> None:
    """Its place is free for others, its lease is renewed, its calls are over, and its reward is taken."""
    async with World(tmp_path, 3, workflow=silent, episodes=1, late_rewards=600, givers="agent") as world:
        await waiting(world, 3)
        session = world.gateway.sessions.get("g.1-a")
        with pytest.raises(Exception, match="is not open"):
            await call(f"{world.url}/s/g.1-a/v1", session.key)
        status, said = await post(f"{world.url}/s/g.1-a/reward", session.key, {"value": 0.75})
        assert (status, said) == (200, {"session": "g.1-a"})
        await world.dataflow.until(1)
        (done,) = world.dataflow.done
        assert (done.attempt, done.reward, [sample.reward for sample in done.samples]) == ("g.1-a", 0.75, [0.75])
        beat = world.node._beat()
        assert sorted(beat.attempts) == ["g.0-a", "g.2-a"]
        assert beat.capacity == 3
        assert all(ask.want == 1 for ask in world.dataflow.asked)
        assert (await post(f"{world.url}/s/g.1-a/reward", session.key, {"value": 1.0}))[0] == 404


async def test_without_a_reward_in_time_the_episode_fails_and_is_never_zero(tmp_path: Path) -> None:
    clock = Warped()
    async with World(tmp_path, 1, workflow=silent, late_rewards=600, clock=clock) as world:
        await waiting(world)
        clock.ahead = 599.0
        await asyncio.sleep(0.05)
        assert world.episodes.waiting == 1
        clock.ahead = 601.0
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert (failed.cause, failed.error) == (
        "reward_error", "no reward in time: none was returned or given to the session"
    )  # fmt: skip


async def test_the_wait_for_rewards_is_bounded_by_the_sessions(tmp_path: Path) -> None:
    limits = GatewayConfig(sessions=2)
    async with World(tmp_path, 4, workflow=silent, late_rewards=600, limits=limits) as world:
        await waiting(world, 2)
        await asyncio.sleep(0.1)
        assert world.episodes.waiting == 2
        assert len(world.dataflow.tasks) == 2
        await post(f"{world.url}/s/g.0-a/reward", TOKEN, {"value": 1.0})
        await world.dataflow.until(1)
        await waiting(world, 2)


async def test_a_reward_that_came_during_the_episode_is_not_waited_for(tmp_path: Path) -> None:
    async def rewards_itself(episode: Episode) -> None:
        await silent(episode)
        episode.reward(0.25)

    async with World(tmp_path, 1, workflow=rewards_itself, late_rewards=600) as world:
        await world.dataflow.until(1)
    assert [done.reward for done in world.dataflow.done] == [0.25]


async def test_rewards_of_answers_and_leaves_go_with_the_samples(tmp_path: Path) -> None:
    """A leaf's own reward wins over its answers' in the sample, which a trainer reads one by one; the session's is the
    mean of its samples' where it has none."""

    async def two_leaves(episode: Episode) -> None:
        await silent(episode)
        second = await episode.client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": "other"}], max_tokens=8
        )
        episode.reward(0.5, call=second.id)
        episode.reward(1.0, leaf=0)
        episode.reward(3.0, leaf=1)

    rules = RewardRules(steps={"agent": "own"})
    async with World(tmp_path, 1, workflow=two_leaves, rules=rules) as world:
        await world.dataflow.until(1)
        (done,) = world.dataflow.done
        assert done.reward == 2.0
        assert [sample.reward for sample in done.samples] == [1.0, 3.0]
        first, second = world.unit.get([sample.row for sample in done.samples], ["rewards", "mask"])
        assert "rewards" not in first
        column = np.frombuffer(second["rewards"], "<f4")
        assert np.flatnonzero(~np.isnan(column)).tolist() == [len(column) - 1]
        assert column[-1] == 0.5


async def test_the_sessions_reward_is_the_mean_of_its_samples_where_only_answers_have_one(tmp_path: Path) -> None:
    async def by_turn(episode: Episode) -> None:
        await silent(episode)
        episode.reward(0.5, turn=0)
        await silent(episode)
        episode.reward(0.25, turn=1)

    async with World(tmp_path, 1, workflow=by_turn) as world:
        await world.dataflow.until(1)
    assert [done.reward for done in world.dataflow.done] == [0.375]
    assert [sample.reward for sample in world.dataflow.done[0].samples] == [0.5, 0.25]


async def test_a_reward_for_what_is_not_there_fails_the_episode(tmp_path: Path) -> None:
    async def wrong_leaf(episode: Episode) -> float:
        await silent(episode)
        episode.reward(1.0, leaf=5)
        return 1.0

    async with World(tmp_path, 1, workflow=wrong_leaf) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert failed.cause == "reward_error"
    assert "leaf 5" in failed.error


async def test_beside_a_reward_function_a_workflow_cannot_reward_the_session(tmp_path: Path) -> None:
    async def flatters_itself(episode: Episode) -> str:
        await silent(episode)
        episode.reward(100.0)
        return "answer"

    async with World(tmp_path, 1, workflow=flatters_itself, reward=lambda payload, answer: 0.5) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert failed.cause == "workflow_error"
    assert "the recipe's `reward` decides" in failed.error


async def test_a_returned_reward_beside_a_given_one_is_refused(tmp_path: Path) -> None:
    async def says_both(episode: Episode) -> float:
        await silent(episode)
        episode.reward(1.0)
        return 0.0

    async with World(tmp_path, 1, workflow=says_both) as world:
        await world.dataflow.until(1)
    assert "the session was given a reward, and another was returned" in world.dataflow.failed[0].error


async def test_one_policy_without_a_reward_fails_the_episode(tmp_path: Path) -> None:
    async def forgets_one(episode: Episode) -> None:
        for model in episode.policies:
            await episode.client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
            )
        episode.reward(1.0, policy="agent")

    async with World(tmp_path, 1, workflow=forgets_one, policies=("agent", "critic")) as world:
        await world.dataflow.until(1)
    assert [failed.cause for failed in world.dataflow.failed] == ["reward_error"]
    assert "sampled from critic" in world.dataflow.failed[0].error


async def test_the_wait_outlives_the_node(tmp_path: Path) -> None:
    """An episode that was played keeps its session, its gifts and its lease when its node is started again."""

    async def rewards_a_turn(episode: Episode) -> None:
        await silent(episode)
        episode.reward(0.5, turn=0)

    async with World(tmp_path, 1, workflow=rewards_a_turn, late_rewards=600) as world:
        await waiting(world)
        key, first = world.gateway.sessions.get("g.0-a").key, world.incarnation
    async with World(tmp_path, 0, workflow=rewards_a_turn, late_rewards=600, givers="agent") as world:
        assert world.incarnation == first
        await waiting(world)
        assert (await post(f"{world.url}/s/g.0-a/reward", key, {"value": 2.0}))[0] == 200
        await world.dataflow.until(1)
        (done,) = world.dataflow.done
        assert done.reward == 2.0
        (columns,) = world.unit.get([done.samples[0].row], ["rewards"])
        assert np.frombuffer(columns["rewards"], "<f4")[-1] == 0.5
        assert len(world.gateway.sessions) == 0
    async with World(tmp_path, 0, workflow=rewards_a_turn, late_rewards=600) as world:
        assert world.incarnation != first
