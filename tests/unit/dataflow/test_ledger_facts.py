"""Facts on a run's health from a ledger's file: counted over the latest groups, read beside the service that writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dataflow_world import World
from rillflow.dataflow.ledger_facts import read_ledger_facts
from rillflow.errors import CorruptData
from rillflow.types import UserError

MakeWorld = Callable[..., World]
HANGS = UserError(kind="slow tool search", where="tools.py:4 in search", error="search took longer than 5 s")


def test_rewards_lengths_and_ends_are_those_of_the_latest_groups(make_world: MakeWorld) -> None:
    world = make_world(staleness=1, group_size=2)
    leases = world.lease()
    for lease in leases[:4]:
        news = world.news(lease, reward=float(lease.task.place))
        samples = [msgspec.structs.replace(one, trained=2 + 3 * lease.task.place, tokens=9) for one in news.samples]
        told = {"forks": 2.0, "tokens_forwarded": 30.0, "tokens_trained": 5.0}
        world.ledger.complete(msgspec.structs.replace(news, samples=samples, calls=3, metrics=told, errors=[HANGS]))
    world.fail(leases[4], "timeout")
    world.ledger.commit()
    facts = read_ledger_facts([world.path])
    samples = facts.samples[world.policy]
    assert (samples.count, samples.groups, samples.lowest, samples.highest) == (4, 2, 0.0, 1.0)
    assert (samples.tokens, samples.by_length) == (3.5, pytest.approx(1.0))
    assert facts.episodes is not None
    assert (facts.episodes.calls, facts.episodes.forks, facts.episodes.forwarded) == (3.0, 2.0, 30.0)
    assert (facts.completed, facts.failed, facts.counters["failures.timeout"]) == (4, 1, 1)
    assert facts.errors == [msgspec.structs.replace(HANGS, count=4)]
    (node,) = facts.nodes
    assert (node.name, node.completed, node.failed, node.pace) == ("n0", 4, 1, 0.5)
    assert facts.last_failure == "timeout: it hung"
    assert facts.heads == world.ledger.heads
    assert facts.last_end == world.clock.now()


def test_a_ledger_without_episodes_has_none(make_world: MakeWorld) -> None:
    facts = read_ledger_facts([make_world().path])
    assert (facts.completed, facts.samples, facts.episodes, facts.last_end) == (0, {}, None, None)


def test_rewards_that_are_all_equal_have_no_correlation(make_world: MakeWorld) -> None:
    world = make_world(group_size=2)
    for lease in world.lease(2):
        world.done(lease, reward=0.0)
    world.ledger.commit()
    samples = read_ledger_facts([world.path]).samples[world.policy]
    assert (samples.lowest, samples.highest, samples.by_length) == (0.0, 0.0, None)


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(CorruptData):
        read_ledger_facts([path])
