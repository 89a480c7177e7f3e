"""A node that leaves: it ends what it can in its time, hands the rest back, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_support import Dataflow, World, until

from rillflow.contracts import Episode
from rillflow.errors import RunError, Unavailable
from rillflow.rollout import node as module
from rillflow.rollout.node import Departure, Node
from rillflow.types import Ack, Heartbeat, HeartbeatReply, LeaveRun


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class Leavable(Dataflow):
    """Retires its node when the test says so."""

    leave_in: float | None = None
    left: list[LeaveRun]

    async def heartbeat(self, beat: Heartbeat, deadline: float) -> HeartbeatReply:
        reply = await super().heartbeat(beat, deadline)
        return HeartbeatReply(lost=reply.lost, heads=reply.heads, phase=reply.phase, leave=self.leave_in)

    async def leave(self, news: LeaveRun, deadline: float) -> Ack:
        self.left = [*getattr(self, "left", []), news]
        return Ack(accepted=True)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_WAIT", 0.01)
    monkeypatch.setattr(module, "HEARTBEAT_EVERY", 0.02)


class Held:
    """A workflow whose episodes end when they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.playing = 0

    def workflow(self) -> Any:
        async def play(episode: Episode) -> float:
            self.playing += 1
            await episode.client.chat.completions.create(
                model=episode.model, messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
            await self.go.wait()
            return 1.0

        return play


def leavable(folder: Any, held: Held, tasks: int) -> World:
    world = World(folder, tasks, workflow=held.workflow(), episodes=2)
    world.dataflow = Leavable(world.dataflow.tasks, world.unit, world.engines.serving)
    return world


async def test_a_retired_node_ends_what_it_plays_and_goes(tmp_path):
    held = Held()
    async with leavable(tmp_path, held, 5) as world:
        await until(lambda: held.playing == 2)
        world.dataflow.leave_in = 60.0
        await until(lambda: any(beat.leaving for beat in world.dataflow.beats))
        asked = len(world.dataflow.asked)
        held.go.set()
        await asyncio.wait_for(world.running, 20)
        assert len(world.dataflow.done) == 2
        assert len(world.dataflow.asked) == asked
        assert world.dataflow.left == [LeaveRun(node="n", incarnation=world.incarnation)]


async def test_what_takes_too_long_is_handed_back_and_its_session_forgotten(tmp_path):
    held = Held()
    async with leavable(tmp_path, held, 2) as world:
        await until(lambda: held.playing == 2)
        world.dataflow.leave_in = 0.0
        await asyncio.wait_for(world.running, 20)
        assert world.dataflow.done == world.dataflow.failed == []
        assert len(world.dataflow.left) == 1
    async with leavable(tmp_path, held, 0) as after:
        assert after.incarnation != world.incarnation


async def test_a_node_without_episodes_goes_at_once(tmp_path):
    async with leavable(tmp_path, Held(), 0) as world:
        world.dataflow.leave_in = 3600.0
        await asyncio.wait_for(world.running, 20)
        assert len(world.dataflow.left) == 1


async def test_the_end_of_the_run_comes_before_any_leaving(tmp_path):
    held = Held()
    async with leavable(tmp_path, held, 2) as world:
        await until(lambda: held.playing == 2)
        world.dataflow.leave_in = 3600.0
        await until(lambda: any(beat.leaving for beat in world.dataflow.beats))
        await world.end()
        assert not hasattr(world.dataflow, "left")


def test_the_earliest_word_counts():
    clock, changes = FakeClock(), []
    departure = Departure(clock)
    departure.on_change = lambda: changes.append(departure.left)
    assert not departure.begun
    departure.within(30.0)
    departure.within(60.0)
    clock.time += 10
    departure.within(5.0)
    assert changes == [30.0, 5.0]
    clock.time += 10
    assert departure.begun
    assert departure.left == 0.0


# ---------------------------------------------------------------- nobody supervises it


class Away(Dataflow):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__([])
        self.clock = clock

    async def lease_tasks(self, ask: Any) -> Any:
        raise Unavailable("away")

    async def heartbeat(self, beat: Any, deadline: float) -> HeartbeatReply:
        self.clock.time += 10
        raise Unavailable("away")


async def test_a_service_that_is_gone_for_good_is_not_waited_for_for_ever(tmp_path):
    clock = FakeClock()
    async with World(tmp_path, 0, workflow=Held().workflow()) as world:
        node = Node(
            "n", "i", world.episodes._limits, dataflow=Away(clock), engines=world.engines,  # type: ignore[arg-type]
            episodes=world.episodes, patience=600.0, clock=clock,
        )  # fmt: skip
        with pytest.raises(RunError, match="has not answered for 610 s"):
            await asyncio.wait_for(node.run(), 20)
