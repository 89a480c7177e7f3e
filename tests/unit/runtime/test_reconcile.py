"""From tags to processes: which are started, drained and restarted, whatever changes meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import msgspec
import pytest

from rillflow.config import load_recipe
from rillflow.errors import RunError
from rillflow.resources.placement import Placed, retagged
from rillflow.resources.workers import WorkersFile
from rillflow.runtime.reconcile import Reconciler

RECIPE = load_recipe(
    "quickstart",
    ["resources.workers=[{tags: [rollout, train]}, {tags: [train]}, {tags: [rollout], count: 2}]"],
)


class Carrier:
    """Records its calls; a process ends when the test lets it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.running: dict[str, Placed] = {}
        self.doors: dict[str, asyncio.Event] = {}

    def start(self, process: Placed) -> None:
        assert process.name not in self.running, "its predecessor is still there"
        self.told.append(f"start {process.name}")
        self.running[process.name] = process

    async def retire(self, process: Placed) -> None:
        await self._end("retire", process)

    async def stop(self, process: Placed) -> None:
        await self._end("stop", process)

    async def _end(self, how: str, process: Placed) -> None:
        self.told.append(f"{how} {process.name}")
        self.doors[process.name] = asyncio.Event()
        await self.doors[process.name].wait()
        del self.running[process.name]

    def open(self, name: str) -> None:
        self.doors[name].set()


class World:
    def __init__(self, root: Path) -> None:
        self.file = WorkersFile(root)
        self.file.prepare(RECIPE)
        self.carrier = Carrier()
        self.reconciler = Reconciler(RECIPE, self.file, self.carrier)
        self.reconciler.begin()

    def tag(self, worker: str, *words: str) -> None:
        self.file.change(lambda workers: retagged(RECIPE, workers, worker, words))

    async def look(self) -> list[str]:
        """Return the calls of one look, once its changes have got as far as they can."""
        before = len(self.carrier.told)
        for _ in range(3):
            self.reconciler.look()
            await asyncio.sleep(0.01)
        return self.carrier.told[before:]

    def worker(self, name: str) -> tuple[str, int | None]:
        (found,) = [worker for worker in self.file.read() if worker.name == name]
        return found.process, found.rank


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_the_first_plan_is_started_and_written_down(world: World) -> None:
    assert world.carrier.told == [
        "start trainer-agent", "start rollout-trainer-agent-rank0", "start rollout-0", "start rollout-1",
    ]  # fmt: skip
    assert world.worker("trainer-agent-rank1") == ("trainer-agent", 0)
    assert world.worker("rollout-1") == ("rollout-1", None)
    assert await world.look() == [], "nothing to do"


async def test_a_node_that_loses_its_tag_drains_and_one_that_gains_it_is_started(world: World) -> None:
    world.tag("rollout-1", "none")
    assert await world.look() == ["retire rollout-1"]
    assert world.worker("rollout-1") == ("", None)
    assert world.reconciler.is_changing("rollout-1")
    world.tag("rollout-1", "rollout")
    assert await world.look() == [], "its predecessor has not gone yet"
    world.carrier.open("rollout-1")
    assert await world.look() == ["start rollout-1"]
    assert not world.reconciler.is_changing("rollout-1")


async def test_a_trainer_whose_workers_change_is_begun_anew_with_them(world: World) -> None:
    world.tag("trainer-agent-rank1", "+rollout")
    assert await world.look() == ["stop trainer-agent"]
    world.carrier.open("trainer-agent")
    assert await world.look() == ["start trainer-agent"]
    assert world.carrier.running["trainer-agent"].playing == (0,)
    world.tag("trainer-agent-rank1", "rollout")
    assert await world.look() == ["start rollout-trainer-agent-rank1", "retire rollout-trainer-agent-rank0",
                                  "stop trainer-agent"]  # fmt: skip
    world.carrier.open("trainer-agent")
    await world.look()
    assert world.carrier.running["trainer-agent"].workers == ("trainer-agent-rank0",)


async def test_changes_that_come_during_a_change_end_at_the_last_word(world: World) -> None:
    for words in (["+rollout"], ["-rollout"], ["+rollout"]):
        world.tag("trainer-agent-rank1", *words)
        await world.look()
    assert world.carrier.told.count("stop trainer-agent") == 1
    world.carrier.open("trainer-agent")
    await world.look()
    assert world.carrier.running == world.reconciler.plan.processes
    world.tag("trainer-agent-rank1", "-rollout")
    await world.look()
    world.carrier.open("trainer-agent")
    await world.look()
    assert world.carrier.running == world.reconciler.plan.processes


async def test_tags_that_nobody_could_work_with_change_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.file.change(lambda workers: [msgspec.structs.replace(worker, tags=frozenset()) for worker in workers])
    with caplog.at_level(logging.ERROR):
        assert await world.look() == []
    assert len(caplog.records) == 1, "said once"
    world.file.path.write_text("{")
    assert await world.look() == []
    assert world.carrier.running == world.reconciler.plan.processes


async def test_what_was_lost_is_left_out_until_its_tags_are_set_anew(world: World) -> None:
    del world.carrier.running["rollout-0"]
    assert world.reconciler.lost("rollout-0")
    assert await world.look() == []
    world.tag("rollout-0", "rollout")
    assert await world.look() == ["start rollout-0"]


async def test_the_run_ends_with_its_last_node_and_with_any_trainer(world: World) -> None:
    assert not world.reconciler.lost("trainer-agent")
    assert not world.reconciler.lost("unit-0")
    assert world.reconciler.lost("rollout-0")
    assert world.reconciler.lost("rollout-1")
    assert not world.reconciler.lost("rollout-trainer-agent-rank0")


async def test_a_run_that_comes_back_gives_ranks_to_whom_they_belonged(world: World, tmp_path: Path) -> None:
    world.tag("trainer-agent-rank1", "rollout")
    await world.look()
    assert world.worker("trainer-agent-rank0") == ("trainer-agent", 0)
    world.tag("trainer-agent-rank1", "+train")
    await world.look()
    again = Reconciler(RECIPE, WorkersFile(tmp_path), Carrier())
    again.begin()
    assert again.plan.trainers[0].workers == ("trainer-agent-rank0",)


async def test_a_change_that_fails_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(process: Placed) -> None:
        raise RunError("no way")

    monkeypatch.setattr(world.carrier, "retire", fails)
    world.tag("rollout-1", "none")
    with pytest.raises(RunError, match="no way"):
        await world.look()


async def test_closing_leaves_everything_as_it_is(world: World) -> None:
    world.tag("rollout-1", "none")
    await world.look()
    async with asyncio.timeout(60):
        await world.reconciler.close()
    assert "rollout-1" in world.carrier.running


def test_a_run_without_workers_for_a_tag_does_not_begin(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path)
    file.prepare(RECIPE)
    content = json.loads(file.path.read_text())
    for worker in content["workers"]:
        worker["tags"] = ["train"]
    file.path.write_text(json.dumps(content))
    with pytest.raises(RunError, match="no worker rolls out"):
        Reconciler(RECIPE, file, Carrier()).begin()
