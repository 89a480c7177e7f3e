"""A lease that is asked for again is the same one. `test_every_route` asks this of every call."""

from __future__ import annotations

import pytest
from dataflow_server import served

from dataflow_world import POLICY
from rillflow.errors import BadRequest
from rillflow.types import LeaseTasks


async def test_a_lease_that_is_asked_for_again_is_the_same(tmp_path):
    """As when the answer was lost: the client sends the same body again."""
    async with served(tmp_path) as run:
        ask = LeaseTasks(node="n0", incarnation="a", want=2, versions={POLICY: 0})
        first, again = await run.client.lease_tasks(ask), await run.client.lease_tasks(ask)
        assert len(first.leases) == 2
        assert again == first
        assert run.ledger.nodes.held("n0") == (2, 0)
        other = await run.client.lease_tasks(LeaseTasks(node="n0", incarnation="a", want=2, versions={POLICY: 0}))
        assert not {lease.attempt for lease in other.leases} & {lease.attempt for lease in first.leases}


def test_a_lease_is_repeated_after_the_service_was_killed(make_world):
    world = make_world()
    first = world.lease(2, ask="q")
    world.ledger.commit()
    world.crash()
    assert world.lease(2, ask="q") == first
    assert world.ledger.nodes.held("n0") == (2, 0)


def test_a_lease_that_is_repeated_has_its_full_time_again(make_world):
    world = make_world(task_lease=30.0, node_timeout=1e9)
    (lease,) = world.lease(1, ask="q")
    world.clock.time += 20
    world.lease(1, ask="q")
    world.clock.time += 20
    world.ledger.expire()
    assert world.task(lease.task.id) == "leased"


def test_what_is_no_longer_held_is_not_repeated(make_world):
    world = make_world()
    one, two = world.lease(2, ask="q")
    world.done(one)
    assert world.lease(2, ask="q") == [two]
    world.done(two)
    assert not {lease.attempt for lease in world.lease(2, ask="q")} & {one.attempt, two.attempt}


def test_another_nodes_attempt_id_is_not_repeated(make_world):
    world = make_world()
    mine = world.lease(1, ask="q", node="n0")
    theirs = world.lease(1, ask="q", node="n1")
    assert mine[0].task.id != theirs[0].task.id


@pytest.mark.parametrize("attempt", ["", "x" * 201])
def test_an_attempt_id_is_short(make_world, attempt):
    world = make_world()
    with pytest.raises(BadRequest):
        world.lease(1, ask=attempt)
