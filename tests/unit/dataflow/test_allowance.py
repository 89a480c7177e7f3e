"""How many tasks a node may hold, and what a group does that takes too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow_world import RULES
from rillflow.dataflow.ledger.leasing import PROBE_AFTER, NodeLook, Work, allowance

GOOD = NodeLook(8, ends=10.0, pace=2.0, speed=0.5, held=8)
PLENTY = Work(1000)


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
    found = allowance(node, others, PLENTY, behind=age[0], bound=age[1])
    assert found.tasks == tasks
    assert why in found.why
    assert bool(found.why) == bool(why)


# ---------------------------------------------------------------- speed


def slow(times: float, capacity: int = 8, held: int = 0, idle: float = 0.0) -> NodeLook:
    """So many times slower than GOOD."""
    return NodeLook(capacity, ends=10.0, pace=2.0 * times, speed=0.5 / times, held=held, idle=idle)


@pytest.mark.parametrize(
    ("node", "others", "work", "tasks"),
    [
        (slow(4), [GOOD] * 3, Work(100), 8),  # there is work for everybody: it adds what it can
        (slow(4), [GOOD] * 3, Work(8), 8),  # the others are full
        (slow(4), [GOOD] * 3, Work(4), 4),  # no more than what the others have no room for
        (slow(4), [slow(1, held=4)] * 3, Work(4), 1),  # a thirteenth of 16
        (slow(4, held=3), [slow(1, held=4)] * 3, Work(11), 2),  # a thirteenth of 26
        (slow(4), [slow(1, held=0)] * 2, Work(15), 1),  # a ninth
        (slow(4), [slow(1, held=0)] * 2, Work(15, group=4), 0),  # others' hands are free: it would hold a group up
        (slow(2, capacity=16), [slow(1, held=0)], Work(7, group=4), 0),  # half, but no whole group
        (slow(2, capacity=16), [slow(1, held=0)] * 2, Work(13, group=4), 4),  # a third, in whole groups
        (slow(4, held=3), [slow(1, held=4)] * 3, Work(24), 8),
        (slow(4), [GOOD], Work(0), 1),  # a fifth of 8
        (slow(1.4), [slow(1, held=0)], Work(4), 8),  # not slow enough to speak of
        (slow(4, capacity=32), [slow(1, held=0)] * 1, Work(8), 4),  # slow, but large: as many samples a second
        (slow(4), [NodeLook(8)] * 3, Work(4), 8),  # nothing is known of the others
        (slow(4), [], Work(4), 8),  # it is alone
        (slow(100), [slow(1, held=0)] * 3, Work(4), 0),
        (slow(100, idle=1e6), [slow(1, held=0)] * 3, Work(4), 8),  # long ago: it may have recovered
    ],
)
def test_a_slow_node_holds_its_share_of_a_stream(node, others, work, tasks):
    assert allowance(node, others, work).tasks == tasks


@pytest.mark.parametrize(
    ("node", "pending", "tasks"),
    [
        (slow(4), 1000, 8),
        (slow(4), 72 + 5, 5),  # the others do 12 a second, so 72 in the 6 s that this node takes longer
        (slow(4), 72, 0),
        (slow(4), 10, 0),
        (slow(4, held=3), 10, 3),  # it keeps its leases
        (slow(4, idle=0.0), 20, 0),
        (slow(4, idle=1e6), 20, 8),  # long ago: it may have recovered
        (slow(1), 1, 8),
    ],
)
def test_nobody_waits_for_the_last_task_of_a_slow_node(node, pending, tasks):
    assert allowance(node, [GOOD] * 3, Work(pending, ends=True)).tasks == tasks


def test_free_hands_of_quick_nodes_come_first():
    assert allowance(slow(4), [GOOD, slow(1, held=0)], Work(48 + 8 + 2, ends=True)).tasks == 2


looks = st.builds(
    NodeLook,
    capacity=st.integers(1, 64),
    ends=st.floats(0, 20),
    bad_ends=st.just(0.0),
    bad_row=st.integers(0, 20),
    pace=st.none() | st.floats(0.01, 1e6),
    speed=st.none() | st.floats(1e-6, 1e3),
    held=st.integers(0, 64),
    idle=st.floats(-1e9, 1e9),
)
works = st.builds(Work, pending=st.integers(0, 1000), group=st.integers(1, 9), ends=st.booleans())


@given(looks, st.lists(looks, max_size=4), works, st.integers(0, 9), st.integers(0, 9))
def test_never_above_the_capacity_and_never_none_without_a_quicker_one(node, others, work, behind, bound):
    found = allowance(node, others, work, behind=behind, bound=bound)
    assert (0 if "slower" in found.why else 1) <= found.tasks <= node.capacity
    if not any(other.speed and node.speed and other.speed > node.speed for other in others):
        assert "slower" not in found.why


@given(looks, st.lists(looks, max_size=4), works)
def test_what_all_others_together_have_no_room_for_is_anybodys(node, others, work):
    waits = work.pending + node.held + sum(other.held for other in others) - sum(other.capacity for other in others)
    if not work.ends and waits >= node.capacity:
        assert "slower" not in allowance(node, others, work).why


@given(looks, st.lists(looks, min_size=1, max_size=4), works, st.floats(1, 10))
def test_a_slower_node_never_gets_more(node, others, work, times):
    if node.pace and node.speed:
        slower = NodeLook(
            node.capacity, node.ends, 0.0, node.bad_row, node.pace * times, node.speed / times, node.held, 0.0
        )
        now = NodeLook(node.capacity, node.ends, 0.0, node.bad_row, node.pace, node.speed, node.held, 0.0)
        assert allowance(slower, others, work).tasks <= allowance(now, others, work).tasks


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
    for _ in range(20):  # old results count less and less
        world.done(world.lease(1)[0])
    assert len(world.lease(5)) > 2


def test_a_node_that_is_alone_is_not_held_back(make_world):
    world = make_world(staleness=9, attempts=99)
    for lease in world.lease(20):
        world.fail(lease)
    assert len(world.lease(5)) == 5


def test_a_slow_node_gets_fewer_where_there_is_not_enough(make_world):
    world = make_world(staleness=3)  # 16 tasks
    for node, seconds in (("n0", 8.0), ("n1", 2.0)):
        world.beat(node=node)
        for lease in world.lease(4, node=node):
            world.done(lease, node=node, seconds=seconds)
    assert world.lease(8) == []  # a fifth of the eight that are left is less than a group
    assert "slower than the others: 0 of 8" in world.ledger.why_no_tasks("n0", world.ledger.heads)
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
