"""A power cut while episodes are played and trained: no trained row is lost, all others are played again, counted.

The ledger is synced, so it is as it was when the power went; the trainer comes back with the checkpoint that the ledger
has heard of; the units lose what they had not synced.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow_world import POLICY, World, prompts
from power_cut import Disk
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.errors import CorruptData
from rillflow.storage.records import Place
from rillflow.storage.segments import segment_numbers
from rillflow.types import Batch, Row, UnitBeat
from soak import repetitions


class PoweredWorld(World):
    """A ledger whose rows lie in a real unit on a disk that can lose its power."""

    def __init__(self, folder: Path, disk: Disk, durability: Any) -> None:
        self.disk, self.durability = disk, durability
        self.files = self._open_unit(folder / "unit")
        self.length = 0
        super().__init__(folder, source=prompts(50), staleness=30, total_steps=20)

    def _open_unit(self, folder: Path) -> FileUnit:
        return FileUnit(folder, segment_bytes=1 << 15, durability=self.durability)

    def unit(self, *_: Any, **__: Any) -> list[int]:
        return self.ledger.unit_beat(UnitBeat(info=self.files.info())).drop

    def row_of(self, attempt: str, policy: str = POLICY) -> Row:
        if (attempt, policy) not in self.rows_of:
            self.length = self.length % 3000 + 700  # rows that begin and end anywhere in a page
            row = {"tokens": np.full(self.length, len(self.rows_of) + 1, "<i4")}
            (self.rows_of[attempt, policy],) = self.files.put([row])
        return self.rows_of[attempt, policy]

    def play_all(self, node: str = "n0") -> int:
        """Play slightly more than a batch needs: shares that wait long would expire."""
        leases = self.lease(want=6, node=node)
        for lease in leases:
            self.done(lease, node=node)
        return len(leases)

    def power_cut(self) -> None:
        self.ledger.commit()
        self.files.close()
        self.disk.cut()
        self.files = self._open_unit(self.folder / "unit")
        self.crash()
        self.unit()

    def unreadable(self, rows: list[Row]) -> list[Row]:
        places = [Place(row.segment, row.offset, row.length) for row in rows]
        found = self.files._reader.read(places, {"tokens": np.dtype("<i4")})
        return [row for row, one in zip(rows, found, strict=True) if isinstance(one, CorruptData)]

    def counter(self, name: str) -> int:
        return int(self.ledger.db.value("SELECT value FROM counters WHERE name = ?", (name,)) or 0)

    def train_all(self) -> list[Batch]:
        """Train until nothing is left; batches with lost rows are reported as a trainer does."""
        trained: list[Batch] = []
        while True:
            self.play_all()
            batch = self.ask().batch
            if batch is None:
                return trained
            if lost := self.unreadable([sample.row for sample in batch.samples]):
                self.lose(*lost)
                continue
            self.commit(batch)
            trained.append(batch)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    durability, seed = request.param
    disk = Disk(tmp_path / "unit", monkeypatch, random.Random(seed))
    world = PoweredWorld(tmp_path, disk, durability)
    yield world
    world.close()
    world.files.close()


def play_until_the_power_goes(world: PoweredWorld) -> tuple[set[str], set[str]]:
    """Train three batches, with a checkpoint after the first; return the tasks that it contains and all others done."""
    first = world.step(restorable=1)
    for _ in range(2):
        world.step(restorable=1)
    world.play_all()
    trained = {sample.task for sample in first.samples}
    done = {str(row["id"]) for row in world.ledger.db.all("SELECT id FROM tasks WHERE state = 'done'")}
    return trained, done - trained


@pytest.mark.soak
@pytest.mark.parametrize("world", [("process", seed) for seed in range(repetitions(3, 8))], indirect=True)
def test_a_power_cut_loses_no_trained_row_and_the_others_are_played_again(world: PoweredWorld) -> None:
    before, others = play_until_the_power_goes(world)
    rows = set(world.rows_of.values())
    world.power_cut()
    lost = world.unreadable(sorted(rows, key=lambda row: (row.segment, row.offset)))
    assert lost, "this cut took nothing: the test would show nothing"
    world.join(checkpoint=1, published=3)
    trained = [sample.task for batch in world.train_all() for sample in batch.samples]
    assert not before & set(trained), "a row that the checkpoint contains was trained again"
    assert len(trained) == len(set(trained)), "a row was trained twice"
    assert others <= set(trained), "an acknowledged episode was never trained"
    assert world.check()["quarantined"] == world.counter("rerun.damaged") > 0
    assert len(set(world.rows_of.values())) == len(world.rows_of), "a new row lies where an old one was"


@pytest.mark.soak
@pytest.mark.parametrize("world", [("machine", seed) for seed in range(repetitions(2, 4))], indirect=True)
def test_a_power_cut_takes_nothing_that_was_synced(world: PoweredWorld) -> None:
    before, others = play_until_the_power_goes(world)
    rows = list(world.rows_of.values())
    world.power_cut()
    assert world.unreadable(rows) == []
    world.join(checkpoint=1, published=3)
    trained = [sample.task for batch in world.train_all() for sample in batch.samples]
    assert not before & set(trained)
    assert others <= set(trained)
    assert world.check()["quarantined"] == world.counter("rerun.damaged") == 0


def test_a_number_is_not_used_again_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a new row could lie where the ledger believes a lost one."""
    for seed in range(20):
        folder = tmp_path / str(seed)
        disk = Disk(folder, monkeypatch, random.Random(seed))
        unit = FileUnit(folder, segment_bytes=2000)
        old = unit.put([{"tokens": np.full(300, 1, "<i4")} for _ in range(5)])
        unit.close()
        disk.cut()
        assert set(segment_numbers(folder)) == {row.segment for row in old}
        unit = FileUnit(folder, segment_bytes=2000)
        new = unit.put([{"tokens": np.full(300, 2, "<i4")} for _ in range(5)])
        unit.close()
        assert not {row.segment for row in old} & {row.segment for row in new}
