from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chrome_trace import check_trace, flows_of
from dataflow_world import World
from rillflow.dataflow.episode_history import life_of, read_history
from rillflow.dataflow.ledger.database import snapshot
from rillflow.errors import RunError
from rillflow.observe.timeline import trace
from rillflow.storage.spans import Span


@pytest.fixture
def played(tmp_path: Path) -> Iterator[World]:
    """Two groups of two, of which one task is retried; a batch, and its step. A third group is under way."""
    world = World(tmp_path, staleness=1)
    first, *others = world.lease(4)
    world.clock.time += 1
    world.fail(first, "tool_error")
    for lease in others:
        world.clock.time += 1
        world.done(lease)
    (again,) = [lease for lease in world.lease() if lease.task.id == first.task.id]
    world.clock.time += 1
    world.done(again)
    world.clock.time += 1
    batch = world.batch()
    world.clock.time += 2
    world.commit(batch)
    world.ledger.commit()
    yield world
    world.close()


def test_the_life_of_an_episode_from_its_prompt_to_its_step(played: World) -> None:
    with snapshot(played.path) as reads:
        moments = life_of(reads, "t000000.0")
    assert [moment.what for moment in moments] == [
        "prompt p0 admitted as group t000000 (train)",
        "leased to n0 as t000000.0-1",
        "t000000.0-1 failed (tool_error) after 1.00 s",
        "leased to n0 as t000000.0-2",
        "t000000.0-2 done after 1.00 s",
        "sample 0 of policy main: 3 of 5 tokens to train, versions 0 to 0, reward 0",
        "served to the trainer of main in batch b000000",
        "group t000000 ended: trained",
        "trained into version 1 of main",
    ]
    with snapshot(played.path) as reads, pytest.raises(RunError, match="no episode 'nobody'"):
        life_of(reads, "nobody")


def test_an_orphaned_step_is_told_as_such(played: World) -> None:
    played.join(checkpoint=0, published=1)
    played.ledger.commit()
    with snapshot(played.path) as reads:
        told = [moment.what for moment in life_of(reads, "t000000.1")]
    assert "trained into version 1 of main, which is orphaned" in told


def test_the_trace_of_a_run_is_valid_and_leads_from_lease_to_step(played: World) -> None:
    with snapshot(played.path) as reads:
        history = read_history(reads, 1000)
    workers = {"n0": [Span("rollout", 1000.0, 1004.0), Span("idle", 1004.0, 1005.0), Span("load", 1005.0, 1005.5)]}
    made = trace(workers, history, now=played.clock.time)
    check_trace(made)
    flows = flows_of(made)
    assert len(flows) == 4, "one for each episode that was trained, and none for the failed attempt"
    assert set(map(tuple, flows.values())) == {
        (f"t00000{group}.{place}", "b000000", "step to version 1") for group in (0, 1) for place in (0, 1)
    }
    slices = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert [one["name"] for one in slices if one["cat"] == "worker"] == ["rollout", "load"]
    failed = [one for one in slices if one["args"].get("state") == "failed"]
    assert [(one["name"], one["args"]["cause"], one["dur"]) for one in failed] == [
        ("t000000.0", "tool_error", 1_000_000)
    ]
    held = [one for one in slices if one["args"].get("state") == "held"]
    assert held, "what is under way is shown up to now"


def test_a_trace_is_bounded_to_the_newest_episodes(played: World) -> None:
    with snapshot(played.path) as reads:
        history = read_history(reads, 2)
        whole = read_history(reads, 1000)
    assert history.episodes == whole.episodes[-2:]
    assert history.episodes_in_all == len(whole.episodes)
    made = trace({}, history, now=played.clock.time)
    check_trace(made)
    assert made["otherData"]["episodes"] == 2


def test_a_run_of_which_nothing_is_known_has_an_empty_trace(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ledger.commit()
    with snapshot(world.path) as reads:
        made = trace({}, read_history(reads, 10), now=5.0)
    assert made["traceEvents"] == []
    world.close()
