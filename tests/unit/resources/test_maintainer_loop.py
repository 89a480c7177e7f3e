"""The maintainer with a fixed clock: its decisions, its waits, and how it keeps up its nodes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from maintainer_world import World, info

from rillflow.config.runs import ScalingConfig
from rillflow.resources.maintainer.upkeep import MOST_FAILURES


def make(folder: Path, *, nodes: int = 2, **scaling: Any) -> World:
    """A run with nodes of its own, all of them heard of."""
    usual = {"least": 1, "most": 6, "cooldown": 60.0, "drain": 30.0}
    world = World(folder, ScalingConfig(**(usual | scaling)))
    world.own_workers = [f"rollout-{n}" for n in range(nodes)]
    world.infos = {name: info(name) for name in world.own_workers}
    return world


def actions(world: World) -> list[str]:
    maintainer = world.maintainer()
    return [line.action for line in maintainer.lines(100)]


async def test_a_starving_trainer_gets_nodes_once_for_a_report(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    world.report(10, 0.5)  # ceil(2 / 0.5) = 4
    await world.after(20, maintainer)
    assert world.log == ["start auto-0", "start auto-1"]
    assert world.alive == {"rollout-0", "rollout-1", "auto-0", "auto-1"}
    assert actions(world) == ["begin", "grow", "start", "start", "joined", "joined"]


async def test_a_report_is_acted_on_once_over_restarts(tmp_path: Path) -> None:
    world = make(tmp_path, cooldown=1.0)
    world.report(10, 0.5)
    await world.after(20, world.maintainer())
    await world.after(20, world.maintainer())
    assert world.log == ["start auto-0", "start auto-1"]


async def test_the_most_and_the_least_are_kept(tmp_path: Path) -> None:
    world = make(tmp_path, most=3, least=2)
    maintainer = world.maintainer()
    world.report(10, 0.95)
    await world.after(70, maintainer)
    assert len(world.alive) == 3
    world.report(20, 0.0, entered=100, consumed=10)
    await world.after(70, maintainer)
    assert len(world.alive) == 2


async def test_a_new_run_gets_its_least(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=1, least=3)
    await world.after(20, world.maintainer())
    assert world.log == ["start auto-0", "start auto-1"]


async def test_nodes_of_the_run_that_are_on_their_way_count(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=2, least=2)
    world.infos = {}
    maintainer = world.maintainer(start_timeout=30.0)
    await world.after(20, maintainer)
    assert world.log == []
    await world.after(20, maintainer)  # they never came
    assert world.log == ["start auto-0", "start auto-1"]


async def test_within_the_cooldown_a_report_is_answered_with_hold(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    world.report(10, 0.3)
    await world.after(20, maintainer)
    world.report(20, 0.5)
    await world.after(60, maintainer)
    assert world.log == ["start auto-0"]
    assert "cooling down" in maintainer.lines(1)[0].why
    world.report(30, 0.5)
    await world.after(10, maintainer)
    assert len(world.alive) == 6


async def test_nothing_is_decided_while_nodes_start(tmp_path: Path) -> None:
    world = make(tmp_path, cooldown=1.0)
    world.delay = 30.0
    maintainer = world.maintainer()
    world.report(10, 0.3)
    await world.after(10, maintainer)
    world.report(20, 0.5)
    await world.after(4, maintainer)
    assert maintainer.lines(1)[0].why == "still starting, or without weights: auto-0"
    await world.after(30, maintainer)
    assert world.log == ["start auto-0"]


async def test_a_node_that_has_no_weights_yet_is_waited_for_but_not_without_end(tmp_path: Path) -> None:
    world = make(tmp_path, cooldown=1.0)
    maintainer = world.maintainer()
    world.infos["by-hand"] = info("by-hand", versions={})
    world.report(10, 0.5)
    await world.after(10, maintainer)
    assert "by-hand" in maintainer.lines(1)[0].why
    await world.after(60, maintainer)
    world.report(20, 0.5)
    await world.after(10, maintainer)
    assert "start auto-0" in world.log


async def test_a_start_that_does_not_join_is_stopped_and_tried_again_with_pauses(tmp_path: Path) -> None:
    world = make(tmp_path)
    world.delay = 1e9
    maintainer = world.maintainer(start_timeout=20.0)
    world.report(10, 0.3)
    await world.after(2000, maintainer)
    starts = [line for line in maintainer.lines(100) if line.action == "start"]
    assert len(starts) == MOST_FAILURES
    pauses = [after.time - before.time - 20.0 for before, after in pairwise(starts)]
    assert all(later > earlier for earlier, later in pairwise(pauses))
    assert world.running == {}, "what did not join was stopped"
    world.report(20, 0.3)
    await world.after(200, maintainer)
    assert sum(what.startswith("start") for what in world.log) == MOST_FAILURES + 1, "one more for a report"


async def test_an_executor_that_refuses_counts_as_a_failed_start(tmp_path: Path) -> None:
    world = make(tmp_path)
    world.broken = True
    maintainer = world.maintainer()
    world.report(10, 0.3)
    await world.after(4, maintainer)
    assert maintainer.lines(1)[0].why == "no machine is free; tried again in 5 s"
    world.broken = False
    await world.after(60, maintainer)
    assert len(world.alive) == 3


async def test_a_dead_node_is_replaced_at_once(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer(start_timeout=10.0)
    world.report(10, 0.3)
    await world.after(40, maintainer)
    world.dead.add("auto-0")
    world.infos["auto-0"] = info("auto-0", state="gone")
    await world.after(10, maintainer)
    assert world.alive == {"rollout-0", "rollout-1", "auto-1"}
    assert maintainer.state.failures == 0


async def test_nodes_that_join_and_die_again_and_again_are_not_started_without_end(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer(start_timeout=60.0)
    world.report(10, 0.3)
    for _ in range(500):
        await world.after(4, maintainer)
        world.dead |= set(world.running)
    assert sum(what.startswith("start") for what in world.log) == MOST_FAILURES


async def test_a_node_that_is_not_heard_of_is_stopped_and_replaced(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer(start_timeout=10.0)
    world.report(10, 0.3)
    await world.after(40, maintainer)
    world.infos["auto-0"] = info("auto-0", state="gone")
    await world.after(10, maintainer)
    assert "stop auto-0" in world.log
    assert "auto-1" in world.alive


async def test_a_node_that_somebody_else_retired_is_not_replaced(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer(start_timeout=10.0)
    world.report(10, 0.3)
    await world.after(40, maintainer)
    world.infos["auto-0"] = info("auto-0", state="left", leaving=True)
    world.dead.add("auto-0")
    await world.after(40, maintainer)
    assert world.alive == {"rollout-0", "rollout-1"}


async def grown(world: World, maintainer: Any) -> None:
    """Two own nodes beside the run's two."""
    world.report(10, 0.5)
    await world.after(70, maintainer, every=5.0)
    assert world.alive == {"rollout-0", "rollout-1", "auto-0", "auto-1"}


async def test_the_slow_node_is_retired_first_and_own_ones_before_the_runs(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    await grown(world, maintainer)
    world.report(20, 0.0, entered=200, consumed=130, rates={"auto-0": 0.2, "rollout-0": 0.1})  # ceil(4 * .65 * 1.1) = 3
    await world.after(10, maintainer)
    assert world.alive == {"rollout-0", "rollout-1", "auto-1"}
    assert world.log[-2:] == ["retire auto-0", "stop auto-0"]


async def test_a_suspect_goes_before_a_slow_one(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    await grown(world, maintainer)
    world.report(20, 0.0, entered=200, consumed=130, rates={"auto-0": 0.2}, suspects=("auto-1",))
    await world.after(10, maintainer)
    assert world.alive == {"rollout-0", "rollout-1", "auto-0"}


async def test_the_runs_own_nodes_go_by_their_tags_and_come_back(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=3, cooldown=10.0)
    maintainer = world.maintainer()
    world.report(10, 0.0, entered=200, consumed=10)
    await world.after(40, maintainer)
    assert world.log == ["take rollout-2", "take rollout-1"], "one of them always stays"
    world.report(20, 0.6)  # ceil(1 / .4) = 3
    await world.after(40, maintainer)
    assert world.log[2:] == ["give rollout-2", "give rollout-1"]


async def test_a_worker_that_somebody_gives_back_is_left_alone(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=3, cooldown=10.0)
    maintainer = world.maintainer()
    world.report(10, 0.0, entered=200, consumed=100)
    await world.after(60, maintainer)
    assert world.log == ["take rollout-2"]
    world.own_workers.append("rollout-2")
    world.infos["rollout-2"] = info("rollout-2")
    await world.after(60, maintainer)
    assert world.log == ["take rollout-2"]
    assert maintainer.state.released == []


async def test_a_node_that_does_not_leave_is_stopped_after_its_time(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    await grown(world, maintainer)
    world.stubborn = True
    world.report(20, 0.0, entered=200, consumed=130)
    await world.after(20, maintainer)
    assert not any(what.startswith("stop") for what in world.log)
    await world.after(40, maintainer)
    assert world.log[-1].startswith("stop auto-")


async def test_nodes_started_by_hand_are_never_retired(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=1)
    world.infos |= {name: info(name) for name in ("by-hand", "colocated-0")}
    maintainer = world.maintainer()
    world.report(10, 0.0, entered=200, consumed=10)
    await world.after(20, maintainer)
    assert world.log == []
    assert maintainer.lines(1)[0].why.endswith("no node that may go")


async def test_idle_nodes_are_retired_though_no_more_is_made_than_is_taken(tmp_path: Path) -> None:
    world = make(tmp_path, cooldown=10.0)
    maintainer = world.maintainer()
    await grown(world, maintainer)
    for name in world.alive:
        world.infos[name] = info(name, held=4)  # half of their room
    world.report(19, 0.07)
    await world.after(20, maintainer)
    world.report(20, 0.0)
    await world.after(10, maintainer)
    assert len(world.alive) == 3, "at most a quarter of the pool goes at once by idleness"


async def test_by_idleness_a_pool_does_not_go_back_to_a_size_that_starved(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=3, cooldown=10.0)
    maintainer = world.maintainer()
    await world.after(10, maintainer)
    world.report(10, 0.2)  # starves at 3: ceil(3 / .8) = 4
    await world.after(20, maintainer)
    assert len(world.alive) == 4
    version = 20
    for turn in range(12):
        for name in world.alive:
            world.infos[name] = info(name, held=1)
        await world.after(20, maintainer)
        world.report(version + turn, 0.0)
        await world.after(4, maintainer)
        if turn < 3:
            assert len(world.alive) == 4
    assert len(world.alive) < 4, "it is forgotten in time"


async def test_a_dry_run_writes_down_and_does_nothing(tmp_path: Path) -> None:
    world = make(tmp_path, dry_run=True)
    maintainer = world.maintainer()
    world.report(10, 0.5)
    await world.after(20, maintainer)
    assert world.log == []
    line = maintainer.lines(1)[0]
    assert (line.action, line.dry_run, line.version, line.branch, line.target) == ("grow", True, 10, "grow", 4)
    assert "2 to 4 nodes" in line.why


async def test_larger_nodes_are_counted_by_their_gpus(tmp_path: Path) -> None:
    world = make(tmp_path, nodes=3)
    maintainer = world.maintainer()
    world.report(10, 0.2, gpus=4)  # 12 GPUs to 15: one node more
    await world.after(20, maintainer)
    assert world.log == ["start auto-0"]
    world.report(20, 0.0, gpus=4, entered=100, consumed=72)  # 16 GPUs to 13: a node less would be too few
    await world.after(70, maintainer)
    assert len(world.alive) == 4


async def test_at_the_end_nodes_leave_by_themselves_or_are_stopped(tmp_path: Path) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    await grown(world, maintainer)
    world.over = True
    world.dead.add("auto-0")
    assert await maintainer.tick()
    assert world.log[-1] == "stop auto-0"
    world.clock.time += 31
    assert not await maintainer.tick()
    assert world.log[-1] == "stop auto-1"


async def test_nodes_of_a_lost_state_are_adopted_and_their_names_not_used_again(tmp_path: Path) -> None:
    world = make(tmp_path)
    await grown(world, world.maintainer())
    (tmp_path / "maintainer.json").unlink()
    maintainer = world.maintainer()
    world.report(20, 0.3)
    await world.after(4, maintainer)
    world.report(30, 0.3)
    await world.after(70, maintainer)
    assert world.log == ["start auto-0", "start auto-1", "start auto-2", "start auto-3"]


@pytest.mark.parametrize("waiting", [None, 0.07])
async def test_between_the_zones_nothing_changes(tmp_path: Path, waiting: float | None) -> None:
    world = make(tmp_path)
    maintainer = world.maintainer()
    world.report(10, waiting, entered=200)
    await world.after(20, maintainer)
    assert world.log == []
    assert maintainer.lines(1)[0].action == "hold"
