"""How many tasks a node may hold, and what a group does that takes too long."""

from __future__ import annotations

import pytest
from dataflow_world import RULES
from hypothesis import given
from hypothesis import strategies as st

from rillflow.dataflow.throttle import PROBE_AFTER, NodeLook, allowance

GOOD = NodeLook(8, ends=10.0, pace=2.0)


@pytest.mark.parametrize(
    ("node", "others", "age", "tasks", "why"),
    [
        (NodeLook(8), [], (0, 4), 8, ""),
        (GOOD, [GOOD], (0, 4), 8, ""),
        (NodeLook(8, ends=10.0, bad_ends=5.0), [GOOD], (0, 4), 4, "fails more often"),
        (NodeLook(8, ends=10.0, bad_ends=10.0), [GOOD], (0, 4), 1, "fails more often"),
        (NodeLook(8, ends=10.0, bad_ends=5.0), [NodeLook(8, ends=10.0, bad_ends=5.0)], (0, 4), 8, ""),  # all do
        (NodeLook(8, ends=10.0, bad_ends=5.0), [], (0, 4), 8, ""),  # it is alone
        (NodeLook(8, ends=2.0, bad_ends=2.0), [GOOD], (0, 4), 8, ""),  # too early to tell
        (NodeLook(8, pace=4.0), [GOOD], (0, 4), 4, "slower"),
        (NodeLook(8, pace=2.9), [GOOD], (0, 4), 8, ""),
        (NodeLook(8, pace=100.0), [GOOD], (0, 4), 2, "slower"),
        (NodeLook(8, pace=4.0), [NodeLook(8)], (0, 4), 8, ""),
        (GOOD, [GOOD], (1, 3), 6, "behind"),
        (GOOD, [GOOD], (3, 3), 2, "behind"),
        (GOOD, [GOOD], (9, 3), 2, "behind"),
        (GOOD, [GOOD], (-1, 3), 8, ""),
        (NodeLook(8, ends=9.0, bad_ends=9.0, bad_row=PROBE_AFTER), [GOOD], (0, 4), 1, "one at a time"),
        (
            NodeLook(8, ends=9.0, bad_ends=9.0, bad_row=99),
            [NodeLook(8, ends=9.0, bad_ends=9.0, bad_row=9)],
            (0, 4),
            8,
            "",
        ),
        (NodeLook(1, ends=10.0, bad_ends=9.0), [GOOD], (3, 3), 1, ""),
    ],
)
def test_a_node_is_held_against_the_others(node, others, age, tasks, why):
    found = allowance(node, others, behind=age[0], bound=age[1])
    assert found.tasks == tasks
    assert why in found.why
    assert bool(found.why) == bool(why)


looks = st.builds(
    NodeLook,
    capacity=st.integers(1, 64),
    ends=st.floats(0, 20),
    bad_ends=st.just(0.0),
    bad_row=st.integers(0, 20),
    pace=st.none() | st.floats(0.01, 1e6),
)


@given(looks, st.lists(looks, max_size=4), st.integers(0, 9), st.integers(0, 9))
def test_never_below_one_never_above_the_capacity(node, others, behind, bound):
    assert 1 <= allowance(node, others, behind=behind, bound=bound).tasks <= node.capacity


# ---------------------------------------------------------------- in the ledger


def test_a_node_whose_episodes_all_fail_gets_one_at_a_time_until_one_succeeds(make_world):
    world = make_world(staleness=9, attempts=99)
    world.beat(node="n1")
    for lease in world.lease(PROBE_AFTER, node="n1"):
        world.done(lease, node="n1")
    for lease in world.lease(PROBE_AFTER):
        world.fail(lease)
    world.clock.time += RULES.node_timeout - 1
    for node in ("n0", "n1"):
        world.beat(node=node)
    (probe,) = world.lease(5)
    assert world.lease(5) == []
    told = world.ledger.why_no_tasks("n0", world.ledger.heads)
    assert "its last 8 episodes failed while others' succeed" in told
    world.done(probe)
    for _ in range(20):  # what it did long ago counts less and less
        world.done(world.lease(1)[0])
    assert len(world.lease(5)) > 2


def test_a_node_that_is_alone_is_not_held_back(make_world):
    world = make_world(staleness=9, attempts=99)
    for lease in world.lease(20):
        world.fail(lease)
    assert len(world.lease(5)) == 5


def test_a_slow_node_gets_fewer(make_world):
    world = make_world(staleness=9)
    for node, seconds in (("n0", 8.0), ("n1", 2.0)):
        world.beat(node=node)
        for lease in world.lease(4, node=node):
            world.done(lease, node=node, seconds=seconds)
    assert len(world.lease(8)) == 2  # a quarter of its capacity
    assert len(world.lease(8, node="n1")) == 8


def test_a_new_process_under_the_name_starts_afresh(make_world):
    world = make_world(staleness=9, attempts=99)
    world.beat(node="n1")
    world.done(world.lease(1, node="n1")[0], node="n1")
    for lease in world.lease(PROBE_AFTER):
        world.fail(lease)
    assert len(world.lease(3, life="b")) == 3


# ---------------------------------------------------------------- groups that take too long


def test_a_group_that_takes_too_long_goes_on_without_the_rest(make_world):
    world = make_world(group_size=3, batch_groups=1, group_deadline=100.0)
    first, second, late = world.lease()
    world.done(first)
    world.done(second)
    for _ in range(11):
        world.clock.time += 10
        world.beat([late.attempt])
        world.ledger.expire()
    assert world.task(late.task.id) == "cancelled"
    assert world.beat([late.attempt]).lost == [late.attempt]
    assert not world.done(late).accepted
    assert [entry.id for entry in world.batch().samples] == ["t000000.0.0", "t000000.1.0"]
    assert world.ledger.steps.counters()["cancelled.group_deadline"] == 1


def test_a_group_that_takes_too_long_with_too_little_fails(make_world):
    world = make_world(batch_groups=1, group_deadline=100.0)
    world.done(world.lease(1)[0])
    world.clock.time += 101
    world.ledger.expire()
    assert world.group("t000000") == ("failed", "group_deadline")
    world.check()


def test_a_group_that_nobody_has_begun_has_no_deadline(make_world):
    world = make_world(group_deadline=100.0)
    world.clock.time += 1000
    world.ledger.expire()
    assert world.group("t000000") == ("playing", "")
