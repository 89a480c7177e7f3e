"""Completions that travel together end as if each had come alone, in the order in which they stand."""

from __future__ import annotations

import random

import msgspec
import pytest

from dataflow_world import POLICY, prompts, sample
from rillflow.errors import RillflowError
from rillflow.types import CompleteTask, Row
from soak import repetitions

NOWHERE = Row(unit="nobody", segment=0, offset=0, length=8)
CLOSE = {"ends", "bad_ends", "pace", "made", "busy"}  # sums of products: they round otherwise when taken together


def at(n):
    return Row(unit="u", segment=n // 7, offset=64 * n, length=64)


def tables(world):
    """Everything that the ledger knows."""
    names = [row["name"] for row in world.ledger.db.all("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {
        name: [dict(row) for row in world.ledger.db.all(f"SELECT * FROM {name}")]
        for name in names
        if not name.startswith("sqlite_") and name != "policies"  # the trainer's incarnation differs
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, rows in one.items():
        for mine, theirs in zip(rows, other[name], strict=True):
            for column, value in mine.items():
                wanted = pytest.approx(theirs[column]) if column in CLOSE and value is not None else theirs[column]
                assert value == wanted, (name, mine, theirs)


def changed(news, **values):
    return msgspec.structs.replace(news, **values)


def drawn(rng, world, leases):
    """Reports of nodes on these leases: mostly completions, and every other kind."""
    news = []
    for n, lease in enumerate(leases):
        node = "n0" if n % 3 else "n1"
        own = [sample(0, trained=rng.choice([3, 3, 3, 0]), row=at(2 * n + k), reward=n % 2) for k in range(1 + n % 2)]
        news.append(world.news(lease, samples=own, node=node, seconds=rng.random()))
    odd = [
        lambda one: changed(one, samples=[changed(one.samples[0], row=NOWHERE)]),
        lambda one: changed(one, samples=[]),
        lambda one: changed(one, reward=float("inf")),
        lambda one: changed(one, calls=-1),
        lambda one: changed(one, attempt="nobody's"),
        lambda one: changed(one, samples=[changed(one.samples[0], policy="nobody's")]),
        lambda one: changed(one, task="t000049.1"),
    ]
    for n in rng.sample(range(len(news)), len(news) // 3):
        news[n] = rng.choice(odd)(news[n])
    for one in rng.sample(news, len(news) // 4):  # reported again, the same or not
        news.insert(rng.randrange(len(news) + 1), rng.choice([one, changed(one, seconds=99.0)]))
    return news


def told(answers):
    return [(type(one).__name__, str(one)) for one in answers]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(repetitions(4, 12)))
@pytest.mark.parametrize("rolled_back", [False, True])
def test_together_or_one_by_one_is_the_same(make_world, seed, rolled_back):
    worlds = [make_world(source=prompts(50), staleness=seed % 3, batch_groups=8, attempts=2) for _ in range(3)]
    rng, parts = random.Random(seed), []
    for world in worlds:
        leases = [*world.lease(24), *world.lease(16, node="n1")]
        if rolled_back:  # so that some versions are dead
            world.ledger.db.run("INSERT INTO orphans VALUES (?, 0, 2)", (POLICY,))
    news = drawn(rng, worlds[0], leases)
    if rolled_back:
        news = [changed(one, samples=[changed(s, newest=rng.choice([0, 1])) for s in one.samples]) for one in news]
    answers = [told(worlds[0].ledger.complete_many(news)), [], []]
    for one in news:
        answers[1] += told(worlds[1].ledger.complete_many([one]))
    while len(parts) < len(news):
        part = news[len(parts) : len(parts) + rng.randint(1, 9)]
        parts += part
        answers[2] += told(worlds[2].ledger.complete_many(part))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 1  # not good news alone
    for world in worlds:
        world.ledger.advance()
    assert_same(tables(worlds[0]), tables(worlds[1]))
    assert_same(tables(worlds[0]), tables(worlds[2]))


def test_one_whose_rows_are_gone_is_played_again_and_the_others_are_taken(make_world):
    world = make_world(batch_groups=4)
    leases = world.lease(8)
    news = [world.news(lease, samples=[sample(0, row=at(n), reward=n % 2)]) for n, lease in enumerate(leases)]
    news[3] = changed(news[3], samples=[sample(0, row=NOWHERE)])
    taken = world.ledger.complete_many(news)
    assert [one.accepted for one in taken] == [n != 3 for n in range(8)]
    assert "payload_gone" in taken[3].reason
    assert [lease.task.id for lease in world.lease(8)] == [leases[3].task.id]


def test_nothing_told_is_nothing_answered(make_world):
    assert make_world().ledger.complete_many([]) == []


def test_the_second_of_two_equal_ones_is_taken_as_the_first(make_world):
    world = make_world()
    (lease,) = world.lease(1)
    news: CompleteTask = world.news(lease)
    other = changed(news, seconds=7.0)
    first, second, third = world.ledger.complete_many([news, news, other])
    assert (first.accepted, second.accepted) == (True, True)
    assert isinstance(third, RillflowError)
    assert world.ledger.db.value("SELECT completed FROM nodes WHERE name = 'n0'") == 1
