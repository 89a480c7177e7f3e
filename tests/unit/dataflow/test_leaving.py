"""Nodes that leave get no more tasks; the tasks that they hand back use up no attempt and are not lost."""

from __future__ import annotations

import pytest

from dataflow_world import RULES
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import LeaveRun, RetireNode


def retire(world, node="n0", drain=60.0):
    return world.ledger.retire(RetireNode(node=node, drain=drain))


def leave(world, node="n0", life="a"):
    return world.ledger.leave(LeaveRun(node=node, incarnation=life))


def returns(world):
    return [tuple(row) for row in world.ledger.db.all("SELECT id, failures, returns FROM tasks WHERE leases > 0")]


def test_a_retired_node_gets_no_more_tasks_and_hears_when_it_has_to_be_gone(make_world):
    world = make_world(staleness=9)
    (held,) = world.lease(1)
    assert world.beat([held.attempt]).leave is None
    retire(world, drain=60.0)
    world.clock.time += 20
    reply = world.beat([held.attempt])
    assert reply.leave == pytest.approx(40.0)
    assert reply.lost == []
    assert world.lease(5) == []
    assert "it leaves" in world.ledger.why_no_tasks("n0", world.ledger.heads)
    assert world.done(held).accepted
    assert world.lease(1, node="n1")


def test_what_it_hands_back_is_leased_elsewhere_at_once_and_counts_against_nobody(make_world):
    world = make_world(staleness=9)
    held = world.lease(3)
    world.beat([], node="n1")
    leave(world)
    again = world.lease(3, node="n1")
    assert {one.task.id for one in again} == {one.task.id for one in held}
    assert all(failures == 0 and lost == 0 for _, failures, lost in returns(world))
    assert world.ledger.steps.counters()["returned.node_left"] == 3
    assert not world.done(held[0]).accepted
    assert world.ledger.nodes.healthy == 1


def test_leaving_ever_so_often_uses_no_attempt_up(make_world):
    world = make_world(staleness=9)
    for life in range(3 * RULES.most_returns):
        (lease,) = world.lease(1, life=str(life))
        leave(world, life=str(life))
    assert world.done(world.lease(1, life="last")[0]).accepted
    assert lease.task.id == "t000000.0"


def test_the_last_word_may_come_twice_and_nothing_is_heard_after_it(make_world):
    world = make_world(staleness=9)
    (held,) = world.lease(1)
    assert leave(world).accepted
    assert leave(world).accepted
    assert world.beat([held.attempt]).lost == [held.attempt]
    with pytest.raises(LeaseLost):
        world.lease(1)
    assert world.ledger.nodes.healthy == 0


def test_the_last_word_of_a_process_that_was_replaced_says_nothing_of_its_successor(make_world):
    world = make_world(staleness=9)
    world.lease(1, life="a")
    (held,) = world.lease(1, life="b")
    leave(world, life="a")
    assert world.beat([held.attempt], life="b").lost == []
    assert world.done(held).accepted


def test_a_new_process_under_the_name_of_one_that_left_stays(make_world):
    world = make_world(staleness=9)
    world.beat()
    retire(world)
    leave(world)
    assert world.beat(life="b").leave is None
    assert world.lease(1, life="b")


def test_the_earlier_end_counts(make_world):
    world = make_world()
    world.beat()
    retire(world, drain=30.0)
    retire(world, drain=100.0)
    assert world.beat().leave == pytest.approx(30.0)
    retire(world, drain=0.0)
    assert world.beat().leave == 0.0


def test_a_clock_that_is_set_back_gives_no_more_than_was_given(make_world):
    world = make_world()
    world.beat()
    retire(world, drain=30.0)
    world.clock.time -= 500
    assert world.beat().leave == pytest.approx(30.0)


def test_one_that_should_have_gone_and_has_not_loses_what_it_holds(make_world):
    world = make_world(staleness=9)
    (held,) = world.lease(1)
    retire(world, drain=5.0)
    for _ in range(9):
        world.clock.time += 2.0
        assert world.beat([held.attempt]).lost == ([] if world.clock.time <= 1016 else [held.attempt])
        world.ledger.expire()
    assert world.task(held.task.id) == "pending"
    assert world.ledger.nodes.healthy == 0


@pytest.mark.parametrize("drain", [-1.0, float("inf"), float("nan")])
def test_odd_seconds_are_refused(make_world, drain):
    world = make_world()
    world.beat()
    with pytest.raises(BadRequest, match="cannot leave within"):
        retire(world, drain=drain)


def test_only_a_node_that_is_there_can_be_retired(make_world):
    world = make_world()
    with pytest.raises(BadRequest, match="was never heard of"):
        retire(world, node="nobody")
    world.beat()
    leave(world)
    with pytest.raises(BadRequest, match="is not there any more"):
        retire(world)


def test_a_node_that_says_it_leaves_gets_none(make_world):
    world = make_world(staleness=9)
    world.beat()
    world.ledger.db.run("UPDATE nodes SET leaving = 1")  # as a heartbeat with `leaving` does
    assert world.lease(1) == []


def test_groups_of_a_node_that_leaves_are_anybodys(make_world):
    world = make_world(staleness=9, group_size=4)
    for node in ("n0", "n1", "n2"):
        world.beat(node=node)
    world.lease(1, node="n0")
    retire(world, node="n0")
    assert [one.task.id for one in world.lease(2, node="n1")] == ["t000000.1", "t000000.2"]


def test_a_dead_node_is_noticed_after_its_time_and_not_before(make_world):
    world = make_world(staleness=9)
    held = world.lease(2)
    world.beat([one.attempt for one in held])
    world.clock.time += RULES.node_timeout
    world.ledger.expire()
    assert world.ledger.nodes.healthy == 1
    assert {world.task(one.task.id) for one in held} == {"leased"}
    world.clock.time += 0.001
    world.ledger.expire()
    assert world.ledger.nodes.healthy == 0
    assert {world.task(one.task.id) for one in held} == {"pending"}


def test_nodes_are_told_of(make_world):
    world = make_world(staleness=9)
    world.beat()
    world.beat(node="n1")
    for _ in range(10):
        for lease in world.lease(4):
            world.done(lease, seconds=1.5)
        world.clock.time += 2.0
        world.beat()
    retire(world)
    leave(world, node="n1")
    mine, other = world.ledger.nodes.infos()
    assert (mine.name, mine.state, mine.leaving, mine.held, mine.completed) == ("n0", "healthy", True, 0, 40)
    assert mine.throughput == pytest.approx(2.0)  # four samples every two seconds
    assert mine.pace == pytest.approx(1.5)
    assert (other.name, other.state, other.throughput) == ("n1", "left", 0.0)
    world.clock.time += 100_000
    world.beat()
    assert [one.name for one in world.ledger.nodes.infos()] == ["n0"]
