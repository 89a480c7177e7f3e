"""Rows that were put and never reported: their segments are reclaimed, and none that may still be reported is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dataflow_world import UNIT, sample
from rillflow.clients.units import LocalWriter
from rillflow.dataflow.storage_unit import FileUnit, UnitService
from rillflow.storage.segments import segment_numbers
from rillflow.types import UnitBeat, UnitInfo

INFO = UnitInfo(unit=UNIT, path="/units/u")
ORPHAN = 7  # a segment that a node wrote into before it died


@pytest.fixture
def world(make_world):
    """A world in which leases last, so that only what a test does ends them."""
    return make_world(drop_after=600.0, task_lease=1e9, batch_lease=1e9, node_timeout=1e9, staleness=1)


def beat(world, *found):
    """Send a heartbeat that reports the unit's idle segments, and drop those that the answer names."""
    reply = world.ledger.unit_beat(UnitBeat(info=INFO, found=list(found)))
    reply = world.ledger.unit_beat(UnitBeat(info=INFO, closed=reply.idle))
    if reply.drop:
        world.ledger.unit_beat(UnitBeat(info=INFO, dropped=reply.drop))
    return reply.drop


def test_a_segment_that_nobody_reported_is_dropped_after_a_while_and_counted(world):
    assert beat(world, ORPHAN) == []
    world.clock.time += 599
    assert beat(world, ORPHAN) == []
    world.clock.time += 2
    assert beat(world, ORPHAN) == [ORPHAN]
    assert beat(world, ORPHAN) == [], "it is known as dropped, whatever an old beat says"
    assert world.check()["segments.reclaimed"] == 1
    assert world.ledger.db.counter("segments_reclaimed") == 1


def test_what_was_reported_is_not_counted_as_reclaimed(world):
    world.step(restorable=1)
    world.clock.time += 601
    assert beat(world, 0, ORPHAN) == []
    world.clock.time += 601
    assert ORPHAN in beat(world, 0, ORPHAN)
    assert world.check()["segments.reclaimed"] == 1


def test_a_row_that_a_live_attempt_may_still_report_stays(world):
    (slow, *others) = world.lease(4)
    for lease in others:
        world.done(lease)
    world.clock.time += 60
    beat(world, ORPHAN)  # the slow one has put its row, and reports it when the disk of the ledger has room again
    world.clock.time += 10_000
    assert beat(world, ORPHAN) == []
    assert world.done(slow, samples=[sample(0, row=world.row(segment=ORPHAN))]).accepted
    world.clock.time += 10_000
    assert beat(world, ORPHAN) == []
    assert world.segment(ORPHAN) == (1, "live")
    assert world.check()["segments.reclaimed"] == 0


def test_a_task_that_was_leased_later_holds_nothing_up(world):
    beat(world, ORPHAN)
    world.clock.time += 1
    world.lease(1)
    world.clock.time += 601
    assert beat(world, ORPHAN) == [ORPHAN]


def test_a_task_that_was_leased_before_holds_it_until_it_ends(world):
    (lease,) = world.lease(1)
    world.clock.time += 1
    beat(world, ORPHAN)
    world.clock.time += 601
    assert beat(world, ORPHAN) == []
    world.fail(lease)
    assert beat(world, ORPHAN) == [ORPHAN]


def test_a_row_that_a_stage_worker_may_still_report_stays(make_world):
    world = make_world(drop_after=600.0, task_lease=1e9, staleness=1, stages=("score",))
    world.play_all()
    batch = world.ask_stage("score", "w", groups=1)
    beat(world, ORPHAN)
    world.clock.time += 601
    later = world.ask_stage("score", "x", groups=1)
    assert beat(world, ORPHAN) == []
    world.commit_stage(batch, "score")
    assert beat(world, ORPHAN) == [ORPHAN]
    world.commit_stage(later, "score")


async def test_a_writer_that_was_killed_leaves_nothing_for_ever(tmp_path, world, monkeypatch):
    """With a real unit: its segments are found at its start, and the file is gone in the end."""
    monkeypatch.setattr("rillflow.dataflow.storage_unit.FIND_SECONDS", 0.01)
    FileUnit(tmp_path / "unit", UNIT).close()
    dead = LocalWriter(tmp_path / "unit")
    dead.put([{"tokens": np.arange(8, dtype=np.int32)}])
    dead.close()  # which gives the lock back, as a kill does
    unit = FileUnit(tmp_path / "unit", UNIT)

    async def told(news):
        world.clock.time += 100
        return world.ledger.unit_beat(news)

    service = UnitService(unit, "token", told, every=0.01)
    await service.start()
    try:
        assert segment_numbers(tmp_path / "unit")
        for _ in range(6000):
            if world.ledger.db.counter("segments_reclaimed"):
                break
            await asyncio.sleep(0.01)
        assert 0 not in segment_numbers(tmp_path / "unit")
    finally:
        await service.stop()
        unit.close()
