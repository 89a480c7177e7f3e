"""A node outlives the errors of the dataflow service, and asks for no more than can be played."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from rollout_support import Dataflow, NoEngines, World, call, task, until

from rillflow.config.rollout import RolloutConfig
from rillflow.contracts import Episode
from rillflow.errors import BadRequest, DeadlineExceeded, DiskFull, RillflowError, Unauthorized, Unavailable
from rillflow.rollout import node as module
from rillflow.rollout import push
from rillflow.rollout.node import Node
from rillflow.types import Ack, CompleteTask, FailTask, HeartbeatReply, LeaseTasks, TaskLeases


class NoEpisodes:
    """Room for two episodes, without a player."""

    finished = waiting = 0
    stopping = resting = False
    on_room: Any = None

    def room(self, under_way: int) -> int:
        return 2 - under_way


class Failing(Dataflow):
    """Fails with the given errors first, then says that the run has ended once a heartbeat was taken."""

    def __init__(self, lease: list[Exception], beat: list[Exception]) -> None:
        super().__init__([])
        self.lease, self.beat = lease, beat

    async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        if self.lease:
            raise self.lease.pop(0)
        await self.over.wait()
        return await super().lease_tasks(ask)

    async def heartbeat(self, beat: Any, deadline: float) -> HeartbeatReply:
        if self.beat:
            raise self.beat.pop(0)
        self.over.set()
        return await super().heartbeat(beat, deadline)


def make(dataflow: Any, engines: Any = None) -> Node:
    episodes: Any = NoEpisodes()
    return Node("n", "i", RolloutConfig(), dataflow=dataflow, engines=engines or NoEngines(), episodes=episodes)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_WAIT", 0.01)
    monkeypatch.setattr(module, "HEARTBEAT_EVERY", 0.01)


async def test_a_failing_service_is_asked_again() -> None:
    dataflow = Failing([RillflowError("disk I/O error")], [RillflowError("disk I/O error")])
    await asyncio.wait_for(make(dataflow).run(), 60)
    assert not dataflow.lease
    assert not dataflow.beat


async def test_a_question_that_was_not_answered_is_asked_again_under_its_attempt_id() -> None:
    asked: list[str] = []

    class Lossy(Failing):
        async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
            asked.append(ask.attempt)
            return await super().lease_tasks(ask)

    await asyncio.wait_for(make(Lossy([DeadlineExceeded("lost"), DeadlineExceeded("lost")], [])).run(), 60)
    assert len(asked) == 3
    assert len(set(asked)) == 1


async def test_a_wrong_token_ends_the_node() -> None:
    with pytest.raises(Unauthorized):
        await asyncio.wait_for(make(Failing([Unauthorized("wrong token")], [])).run(), 60)


async def test_without_engines_no_task_is_asked_for() -> None:
    engines = NoEngines()
    engines.serving = None
    dataflow = Failing([], [])
    await asyncio.wait_for(make(dataflow, engines).run(), 60)
    assert not dataflow.asked
    assert [beat.versions for beat in dataflow.beats][:1] == [{}]


# ---------------------------------------------------------------- following the weights


class Behind(NoEngines):
    """Two policies behind their heads: one pull never ends, the other takes a moment."""

    def __init__(self) -> None:
        super().__init__({"solver": 0, "checker": 0})
        self.pulls: list[str] = []
        self.pulled = asyncio.Event()

    def behind(self, heads: Mapping[str, int]) -> list[str]:
        assert self.serving is not None
        return [policy for policy, version in heads.items() if self.serving[policy] != version]

    async def refresh(self, policy: str) -> None:
        assert self.serving is not None
        self.pulls.append(policy)
        await asyncio.sleep(600 if policy == "solver" else 0)
        self.serving = {**self.serving, policy: 1}
        self.pulled.set()

    async def newer(self, than: Mapping[str, int], seconds: float) -> None:
        await self.pulled.wait()


async def test_a_slow_policy_delays_no_other() -> None:
    """The next question is asked as soon as one policy is up to date."""
    engines, asked = Behind(), []

    class Ahead(Dataflow):
        async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
            asked.append(ask.versions)
            ended = ask.versions["checker"] == 1
            heads = {"solver": 1, "checker": 1}
            return TaskLeases(leases=[], heads=heads, phase="ended" if ended else "training")

    await asyncio.wait_for(make(Ahead([]), engines).run(), 30)
    assert asked == [{"solver": 0, "checker": 0}, {"solver": 0, "checker": 1}]
    assert sorted(engines.pulls) == ["checker", "solver"]


async def test_weights_that_an_engine_took_by_itself_are_told_at_once() -> None:
    """A long question would go on with the versions that it was asked with."""

    class ByItself(NoEngines):
        def behind(self, heads: Mapping[str, int]) -> list[str]:
            return []

        async def newer(self, than: Mapping[str, int], seconds: float) -> None:
            self.serving = {"solver": 1}

    class Ahead(Dataflow):
        async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
            asked.append((ask.versions["solver"], ask.wait > 0))
            return TaskLeases(leases=[], heads={"solver": 1}, phase="ended" if len(asked) == 3 else "training")

    asked: list[tuple[int, bool]] = []
    await asyncio.wait_for(make(Ahead([]), ByItself({"solver": 0})).run(), 30)
    assert asked == [(0, True), (1, True), (1, True)]


# ---------------------------------------------------------------- episodes of a real gateway


async def test_a_lost_lease_cancels_its_episode(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def endless(episode: Episode) -> float:
        begun.set()
        await asyncio.sleep(600)
        return 1.0

    async with World(tmp_path, 1, workflow=endless) as world:
        await asyncio.wait_for(begun.wait(), 20)
        world.dataflow.lost = ["g.0-a"]
        await until(lambda: not len(world.gateway.sessions))
        await world.end()
    assert not world.dataflow.done
    assert not world.dataflow.failed


async def test_an_agent_in_this_process_dies_with_its_node(tmp_path: Path) -> None:
    """The next node drops its session and takes a new incarnation, so that its lease returns at once."""
    begun = asyncio.Event()

    async def endless(episode: Episode) -> float:
        begun.set()
        await asyncio.sleep(600)
        return 1.0

    async with World(tmp_path, 1, workflow=endless) as world:
        await asyncio.wait_for(begun.wait(), 20)
        first = world.incarnation
    async with World(tmp_path, 0, workflow=endless) as world:
        assert world.incarnation != first
        assert len(world.gateway.sessions) == 0


async def test_finished_training_episodes_are_told_to_the_rollout_manager(tmp_path: Path) -> None:
    async def plays(episode: Episode) -> float:
        await episode.client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        return 1.0

    tasks = [task(0), msgspec.structs.replace(task(1), lane="eval"), task(2)]
    async with World(tmp_path, tasks, workflow=plays) as world:
        await world.dataflow.until(3)
        await world.end()
    assert world.engines.finished == 2, "an evaluation brings the trainer no samples"


@pytest.mark.parametrize("error", [DiskFull("no space left"), DeadlineExceeded("late"), Unavailable("away")])
async def test_a_finished_episode_is_told_until_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RillflowError
) -> None:
    """Its session stays meanwhile, and its lease is renewed."""
    monkeypatch.setattr(push, "FIRST_PAUSE", 0.05, raising=False)

    async def plays(episode: Episode) -> float:
        await episode.client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        return 1.0

    async with World(tmp_path, 1, workflow=plays) as world:
        complete, tries = world.dataflow.complete, []

        async def refused_twice(news: CompleteTask, deadline: float) -> Ack:
            tries.append(news)
            if len(tries) < 3:
                raise error
            assert any("g.0-a" in beat.attempts for beat in world.dataflow.beats[-2:])
            return await complete(news, deadline)

        world.dataflow.complete = refused_twice
        await world.dataflow.until(1)
        await world.end()
    assert len(tries) == 3
    assert tries[0] == tries[1] == tries[2], "the same attempt with the same rows"
    assert world.engines.finished == 1


async def test_an_episode_that_is_refused_for_good_is_told_once(tmp_path: Path) -> None:
    async def plays(episode: Episode) -> float:
        await episode.client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        return 1.0

    async with World(tmp_path, 1, workflow=plays) as world:
        tries = []

        async def refused(news: CompleteTask, deadline: float) -> Ack:
            tries.append(news)
            raise BadRequest("seconds are not finite")

        world.dataflow.complete = refused
        await until(lambda: tries and not len(world.gateway.sessions))
        await world.end()
    assert len(tries) == 1


async def test_an_episode_without_a_call_fails(tmp_path: Path) -> None:
    async def idle(episode: Episode) -> float:
        return 1.0

    async with World(tmp_path, 1, workflow=idle) as world:
        await world.dataflow.until(1)
    assert [failed.cause for failed in world.dataflow.failed] == ["no_model_call"]


async def test_a_record_with_holes_is_never_trained(tmp_path: Path) -> None:
    async def damaged(episode: Episode) -> float:
        await episode.client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        world.gateway.sessions.get("g.0-a").incomplete = "a frame of its log is damaged"
        return 1.0

    async with World(tmp_path, 1, workflow=damaged) as world:
        await world.dataflow.until(1)
    (failed,) = world.dataflow.failed
    assert (failed.cause, failed.error) == ("record_incomplete", "a frame of its log is damaged")


async def test_an_episode_that_failed_answers_no_more_calls(tmp_path: Path) -> None:
    """Its open calls may go on: nothing is sampled for it while the run is informed."""
    sessions: list[Episode] = []
    telling, told = asyncio.Event(), asyncio.Event()

    async def fails(episode: Episode) -> float:
        sessions.append(episode)
        raise ValueError("no idea")

    async def fail(news: FailTask, deadline: float) -> Ack:
        telling.set()
        await told.wait()
        return Ack(accepted=True)

    async with World(tmp_path, 1, workflow=fails) as world:
        world.dataflow.fail = fail
        await asyncio.wait_for(telling.wait(), 20)
        with pytest.raises(openai.NotFoundError):
            await call(sessions[0].base_url, sessions[0].api_key)
        told.set()


async def test_what_is_wrong_with_an_engines_weights_is_told_with_the_heartbeat() -> None:
    engines, dataflow = NoEngines(), Dataflow([])
    engines.trouble = "policy agent: version 3 is not served, stale weights"
    running = asyncio.create_task(make(dataflow, engines).run())
    await until(lambda: bool(dataflow.beats))
    assert dataflow.beats[0].trouble == engines.trouble
    dataflow.over.set()
    await asyncio.wait_for(running, 60)
