"""A maintainer that is frozen, cut off from its run or out of disk does nothing twice and nothing that is not kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from maintainer_world import SetClock, World, info

from rillflow.config.runs import ScalingConfig
from rillflow.errors import DeadlineExceeded, DiskFull, RunError
from rillflow.resources.maintainer.loop import PATIENCE, Maintainer
from rillflow.types.balance import Balance


class Ticking(SetClock):
    """Goes on whenever it is looked at."""

    def now(self) -> float:
        self.time += 0.5
        return self.time

    monotonic = now


def make(folder: Path) -> World:
    world = World(folder, ScalingConfig(enabled=True, least=1, most=8), Ticking())
    world.own_workers = ["rollout-0", "rollout-1"]
    world.infos = {name: info(name) for name in world.own_workers}
    return world


def silent(maintainer: Maintainer, world: World, rounds: int, seconds: float) -> None:
    """The run does not answer `times` calls, each after `seconds`; then it has ended."""
    answered, left = maintainer._run.balance, [rounds]

    async def balance() -> Balance:
        if left[0] == 0:
            return await answered()
        left[0] -= 1
        world.clock.time += seconds
        raise DeadlineExceeded("dataflow did not answer", "look at its log")

    async def ended() -> bool:
        world.over = world.over or bool(world.log)
        return world.over

    maintainer._run.balance = balance  # type: ignore[method-assign]
    maintainer._run.ended = ended  # type: ignore[method-assign]


async def test_a_frozen_maintainer_goes_on_where_it_was(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    world.report(10, 0.5)
    await maintainer.tick()
    world.clock.time += 20.0
    world.grow_up()
    await world.after(10, maintainer)
    assert world.log == ["start auto-0", "start auto-1"]
    assert world.alive == {"rollout-0", "rollout-1", "auto-0", "auto-1"}


async def test_a_run_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    world.report(10, 0.5)
    silent(maintainer, world, rounds=5, seconds=30.0)
    await maintainer.run(poll=0.0)
    assert world.log[:2] == ["start auto-0", "start auto-1"]


async def test_a_run_that_never_answers_ends_the_maintainer_and_no_node(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    silent(maintainer, world, rounds=1000, seconds=30.0)
    before = world.clock.time
    with pytest.raises(RunError, match="has not answered"):
        await maintainer.run(poll=0.0)
    assert PATIENCE < world.clock.time - before < PATIENCE + 60.0
    assert world.log == []


async def test_on_a_full_disk_nothing_is_started(tmp_path: Path) -> None:
    world = make(tmp_path)
    world.report(10, 0.5)

    def full(what: str) -> None:
        if what == "write":
            raise DiskFull("no space left", "free some")

    world.trip = full
    with pytest.raises(DiskFull):
        await world.maintainer().run(poll=0.0)
    assert world.log == []
    world.trip = lambda what: None
    await world.after(20, world.maintainer())
    assert world.log == ["start auto-0", "start auto-1"]
