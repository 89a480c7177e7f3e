"""Balance reports of a real ledger: its commits make them, its counters fill them, a rollback breaks nothing."""

from __future__ import annotations

import pytest

from conftest import MakeWorld
from dataflow_world import World
from rillflow.dataflow.balance_ledger import read_balance


def step(world: World, seconds: float = 4.0) -> None:
    """World's steps tell of 1 s of work after 3 s of waiting."""
    world.clock.time += seconds
    world.step()


def test_commits_make_reports_from_the_ledgers_counters(make_world: MakeWorld) -> None:
    world = make_world(balance_every=2)
    step(world)
    assert world.ledger.balances.latest() is None
    step(world)
    latest = world.ledger.balances.latest()
    assert latest is not None
    assert (latest.policy, latest.version, latest.window.steps, latest.window.wall_seconds) == ("main", 2, 2, 8.0)
    assert latest.window.wait_fraction == pytest.approx(0.75)
    made = latest.production
    # On-policy, two groups of two: each step plays and takes four samples.
    assert (made.gpus, made.produced, made.entered, made.consumed) == (1, 8, 8, 8)
    assert made.accept_rate == made.produce_consume_ratio == 1.0
    assert (latest.decision.branch, latest.decision.target) == ("grow", 4)
    (row,) = latest.nodes
    assert (row.id, row.produced, row.accepted, row.state) == ("n0", 8, 8, "healthy")


def test_what_filters_drop_is_produced_but_has_not_entered(make_world: MakeWorld) -> None:
    world = make_world()
    for lease in world.lease():
        world.done(lease, reward=1.0)  # no variance: dropped
    made = world.ledger.balances.now().current.production
    assert made.produced > 0
    assert (made.entered, made.accept_rate, made.produce_consume_ratio) == (0, 0.0, None)


def test_a_rollback_and_a_crash_leave_whole_windows(make_world: MakeWorld) -> None:
    world = make_world(balance_every=2)
    for _ in range(3):
        step(world)
    world.join(checkpoint=1)
    step(world)
    latest = world.ledger.balances.latest()
    assert latest is not None
    assert latest.version == 2, "only one live version since"
    world.ledger.commit()
    world.crash()
    assert world.ledger.balances.latest() == latest
    step(world)
    latest = world.ledger.balances.latest()
    assert latest is not None
    assert (latest.version, latest.window.since, latest.window.steps) == (5, 2, 2)


def test_each_report_is_one_line_of_the_journal(make_world: MakeWorld) -> None:
    world = make_world(balance_every=2)
    for _ in range(4):
        step(world)
    world.ledger.commit()
    lines = [line for _, line in world.ledger.events_after(0) if line.get("event") == "balance"]
    assert [line["version"] for line in lines] == [2, 4]
    assert [line["production"]["consumed"] for line in lines] == [8, 8]


def test_the_file_tells_what_the_ledger_told(make_world: MakeWorld) -> None:
    world = make_world(balance_every=2)
    for _ in range(3):
        step(world)
    world.ledger.commit()
    assert read_balance([world.path], "main") == world.ledger.balances.now()
