"""Nodes that have gone cost nothing: they are summed up, and no count is lost."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from dataflow_world import POLICY
from rillflow.dataflow.balance import Counts
from rillflow.dataflow.balance_ledger import take_look
from rillflow.dataflow.ledger.tables import SUM
from rillflow.types import LeaveRun

MANY = 10_000
KEPT = 64
COLUMNS = ", ".join(f"sum({name}) AS {name}" for name in Counts.__struct_fields__)


@contextmanager
def operations(world):
    """Counts what SQLite does in the block, in hundreds of its virtual machine's instructions."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return 0

    world.ledger.db._connection.set_progress_handler(count, 100)
    try:
        yield counted
    finally:
        world.ledger.db._connection.set_progress_handler(None, 0)


def come_and_go(world, number: int) -> None:
    world.ledger.db.many(
        "INSERT INTO nodes (name, incarnation, state, seen, produced, accepted, consumed, completed) "
        "VALUES (?, 'x', 'gone', ?, 3, 2, 1, 4)",
        [(f"gone{n}", 900.0 + n / number) for n in range(number)],
    )
    world.ledger.db.many("INSERT INTO retired VALUES (?, 'w')", [(f"gone{n}",) for n in range(number)])
    world.ledger.expire()


@pytest.fixture
def worlds(make_world):
    """One in which many nodes have come and gone, and one without."""
    made = [make_world(staleness=5, node_timeout=1e9) for _ in range(2)]
    for world in made:
        for node in ("n0", "n1", "n2"):
            world.beat(node=node)
    come_and_go(made[0], MANY)
    return made


def totals(world) -> dict[str, int]:
    return dict(world.ledger.db.one(f"SELECT {COLUMNS} FROM nodes"))


def test_a_lease_costs_the_same(worlds):
    costs = []
    for world in worlds:
        with operations(world) as count:
            for _ in range(20):
                for lease in world.lease(1, node="n1"):
                    world.done(lease, node="n1")
        costs.append(count[0])
    assert costs[0] < 1.5 * costs[1], costs


def test_a_report_costs_the_same(worlds):
    costs = []
    for world in worlds:
        with operations(world) as count:
            report = world.ledger.balances.now().current
        costs.append(count[0])
        assert [node.id for node in report.nodes if node.state != "gone"] == ["n0", "n1", "n2"]
        assert len(report.nodes) <= KEPT + 3
    assert costs[0] < 100, costs
    assert len(world.ledger.db.value("SELECT value FROM meta WHERE key = 'balance.mark'")) < 100_000


def test_housekeeping_costs_the_same(worlds):
    with operations(worlds[0]) as count:
        for _ in range(10):
            worlds[0].ledger.expire()
    assert count[0] < MANY / 10, "a look at each of those that went would be more"


def test_no_count_is_lost(make_world):
    world = make_world(node_timeout=1e9)
    world.beat()
    before = world.ledger.balances.now().current.production
    come_and_go(world, 500)
    numbers = {"completed": 2000, "failed": 0, "produced": 1500, "accepted": 1000, "consumed": 500, "stale": 0}
    assert totals(world) == numbers
    assert world.ledger.db.value("SELECT count(*) FROM nodes") == 1 + KEPT + 1
    assert world.ledger.db.value("SELECT count(*) FROM retired") == KEPT
    after = world.ledger.balances.now().current.production
    assert (after.produced - before.produced, after.consumed - before.consumed) == (1500, 500)


def test_a_window_counts_nodes_that_were_summed_up_during_it_once(make_world):
    world = make_world(node_timeout=5.0, staleness=1, balance_every=1)
    leases = world.lease(node="old")
    for lease in leases:
        world.done(lease, node="old")
    world.commit(world.batch())  # a report: the mark knows `old`
    made = world.ledger.balances.now().current.production
    world.ledger.leave(LeaveRun(node="old", incarnation="a"))
    world.clock.time += 4000
    world.ledger.expire()
    assert world.ledger.db.value("SELECT completed FROM nodes WHERE name = ?", (SUM,)) == len(leases)
    assert world.ledger.balances.now().current.production.produced == made.produced


def test_what_is_trained_later_is_counted_in_the_sum(make_world):
    world = make_world(staleness=1)
    for lease in world.lease(node="old"):
        world.done(lease, node="old")
    world.ledger.leave(LeaveRun(node="old", incarnation="a"))
    world.clock.time += 4000
    world.ledger.expire()
    batch = world.batch()
    world.commit(batch)
    assert totals(world)["consumed"] == len(batch.samples)


def test_a_node_that_holds_a_task_is_not_summed_up(make_world):
    world = make_world(task_lease=1e9, node_timeout=1e9)
    (lease,) = world.lease(1, node="slow")
    world.ledger.db.run("UPDATE nodes SET state = 'gone', seen = -1e9 WHERE name = 'slow'")
    world.ledger.expire()
    assert world.ledger.nodes.held("slow") == (1, 0)
    world.fail(lease, node="slow")
    world.ledger.expire()
    assert world.ledger.nodes.held("slow") == (0, 0)
    assert world.ledger.db.value("SELECT count(*) FROM nodes WHERE name = 'slow'") == 0


def test_the_sum_is_no_node(make_world):
    world = make_world(node_timeout=1e9)
    world.beat()
    come_and_go(world, KEPT + 1)
    assert SUM not in {info.name for info in world.ledger.nodes.infos()}
    assert SUM not in {node.id for node in world.ledger.balances.now().current.nodes}
    mark = world.ledger.balances._mark()
    assert SUM in {node.name for node in take_look(world.ledger.db, POLICY, mark, 0.0).nodes}
    assert world.ledger.nodes.healthy == 1
