"""The balance report from plain rows: the three-zone rule, the counts of a window, suspect nodes."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.dataflow.balance import (
    MOST_WAITING,
    Counts,
    Look,
    Mark,
    NodeLook,
    Span,
    Step,
    decide,
    joined,
    make_report,
    mark_of,
    wait_fraction,
)
from rillflow.types.balance import Balance, Report

# ---------------------------------------------------------------- the rule

GPUS = st.integers(1, 2000)
MILLI = st.integers(0, 950)  # wait fractions in thousandths, up to the cap
SAMPLES = st.integers(1, 100_000)


@pytest.mark.parametrize(
    ("seen", "branch", "target"),
    [
        ((6, 0.30, 100, 100), "grow", 9),
        ((1, 0.90, 100, 100), "grow", 10),
        ((3, 0.50, 0, 0), "grow", 6),
        ((2, 0.95, 100, 100), "grow", 40),
        ((10, 0.10, 100, 1), "hold", 10),
        ((10, 0.05, 100, 1), "hold", 10),
        ((20, 0.04, 100, 50), "shrink", 11),
        ((11, 0.00, 100, 50), "shrink", 7),
        ((8, 0.00, 1000, 1), "shrink", 1),
        ((10, 0.00, 100, 95), "hold", 10),
        ((10, 0.00, 100, 300), "hold", 10),
        ((10, 0.00, 0, 50), "hold", 10),
        ((10, 0.00, 50, 0), "hold", 10),
        ((0, 0.90, 10, 10), "hold", 0),
        ((10, None, 100, 10), "hold", 10),
    ],
)
def test_the_three_zones(seen: tuple[int, float | None, int, int], branch: str, target: int) -> None:
    """`seen`: GPUs, wait fraction, samples that entered, samples consumed."""
    decision = decide(*seen)
    assert (decision.branch, decision.target, decision.delta) == (branch, target, target - seen[0])


@given(GPUS, MILLI, SAMPLES, SAMPLES)
def test_the_rule_is_the_published_one_in_exact_numbers(gpus: int, milli: int, entered: int, consumed: int) -> None:
    waiting = Fraction(milli, 1000)
    if waiting > Fraction(10, 100):
        exact = math.ceil(gpus / (1 - waiting))
    elif waiting < Fraction(5, 100):
        exact = min(gpus, math.ceil(gpus * Fraction(consumed, entered) * Fraction(110, 100)))
    else:
        exact = gpus
    assert decide(gpus, float(waiting), entered, consumed).target == exact


@given(st.integers(0, 2000), st.floats(0, MOST_WAITING) | st.none(), st.integers(0, 10**9), st.integers(0, 10**9))
def test_targets_are_bounded_and_named_by_their_sign(
    gpus: int, waiting: float | None, entered: int, consumed: int
) -> None:
    decision = decide(gpus, waiting, entered, consumed)
    assert min(gpus, 1) <= decision.target <= 20 * gpus
    assert decision.delta == decision.target - gpus
    assert decision.branch == {1: "grow", 0: "hold", -1: "shrink"}[(decision.delta > 0) - (decision.delta < 0)]


@given(GPUS, MILLI, MILLI, SAMPLES, SAMPLES)
def test_who_waits_longer_never_gets_less(gpus: int, one: int, other: int, entered: int, consumed: int) -> None:
    less, more = (decide(gpus, milli / 1000, entered, consumed).target for milli in sorted((one, other)))
    assert less <= more


@given(GPUS, MILLI, SAMPLES, SAMPLES, SAMPLES)
def test_who_takes_more_never_gets_less(gpus: int, milli: int, entered: int, one: int, other: int) -> None:
    less, more = (decide(gpus, milli / 1000, entered, consumed).target for consumed in sorted((one, other)))
    assert less <= more


@given(GPUS, st.floats(0.05, 0.10), SAMPLES, SAMPLES)
def test_between_the_thresholds_nothing_moves(gpus: int, waiting: float, entered: int, consumed: int) -> None:
    assert decide(gpus, waiting, entered, consumed).branch == "hold"


@given(st.lists(st.tuples(st.floats(-1, 1e6), st.floats(-1, 1e6))))
def test_the_wait_fraction_is_a_fraction(times: list[tuple[float, float]]) -> None:
    found = wait_fraction(Step(n, 0.0, seconds, wait) for n, (seconds, wait) in enumerate(times))
    assert found is None or 0 <= found <= MOST_WAITING


# ---------------------------------------------------------------- the report


def node(name: str, *, gpus: int = 1, version: int | None = 12, gone: bool = False, seen: float = 200.0,
         **counts: int) -> NodeLook:  # fmt: skip
    return NodeLook(name, seen, gone, gpus, version, Counts(**counts))


def look(*nodes: NodeLook, steps: list[Step] | None = None, rounds: list[Span] | None = None, entered: int = 0) -> Look:
    return Look(
        time=200.0,
        version=12,
        settled=11,
        entered=entered,
        steps=steps or [],
        rounds=rounds or [],
        nodes=nodes,
    )


def report(*nodes: NodeLook, mark: Mark | None = None, **options: object) -> Report:
    known = {each.name: Counts() for each in nodes}
    return make_report("agent", mark or Mark(time=100.0, version=10, nodes=known), look(*nodes, **options))  # type: ignore[arg-type]


def test_a_window_of_steps() -> None:
    found = report(steps=[Step(11, 150.0, 6.0, 2.0), Step(12, 180.0, 10.0, 6.0)]).window
    assert (found.since, found.steps, found.counted) == (10, 2, 2)
    assert (found.wall_seconds, found.eval_seconds, found.training_seconds) == (100.0, 0.0, 100.0)
    assert (found.step_seconds, found.batch_wait_seconds) == (12.0, 4.0)
    assert found.wait_fraction == pytest.approx(1 / 3)


def test_steps_that_span_an_evaluation_do_not_count() -> None:
    starved = Step(11, 150.0, 5.0, 35.0)  # 110 to 150
    quiet = Step(12, 170.0, 19.0, 1.0)  # 150 to 170
    found = report(steps=[starved, quiet], rounds=[Span(140.0, 149.0)]).window
    assert (found.steps, found.counted) == (2, 1)
    assert found.wait_fraction == pytest.approx(0.05)
    assert found.eval_seconds == pytest.approx(9.0)
    for touching in (Span(90.0, 110.0), Span(170.0, 200.0)):
        assert report(steps=[starved, quiet], rounds=[touching]).window.counted == 2
    around = report(steps=[starved, quiet], rounds=[Span(50.0, 900.0)])
    assert around.window.wait_fraction is None
    assert around.window.step_seconds is None
    assert around.window.training_seconds == 0.0
    assert around.decision.branch == "hold"


def test_evaluations_that_overlap_are_counted_once() -> None:
    rounds = [Span(150.0, 170.0), Span(90.0, 120.0), Span(110.0, 115.0), Span(160.0, 180.0)]
    assert report(rounds=rounds).window.eval_seconds == pytest.approx(20.0 + 30.0)


def test_time_without_a_service_is_no_part_of_the_window() -> None:
    mark = Mark(time=100.0, version=10, down=60.0)
    found = report(node("a", produced=80), mark=mark, rounds=[Span(100.0, 190.0)])
    assert (found.window.wall_seconds, found.window.eval_seconds) == (40.0, 40.0)
    assert found.production.throughput_per_gpu == 2.0


def test_production_is_what_was_added_since_the_mark() -> None:
    before = {"a": Counts(produced=1000, consumed=900, stale=5), "left": Counts(produced=50, consumed=10)}
    mark = Mark(time=100.0, version=10, entered=500, nodes=before)
    found = report(
        node("a", gpus=3, produced=1400, consumed=1000, stale=25),
        node("left", gone=True, seen=50.0, produced=50, consumed=30),
        mark=mark,
        entered=740,
    ).production
    assert (found.gpus, found.produced, found.entered, found.consumed, found.stale_skipped) == (3, 400, 240, 120, 20)
    assert found.accept_rate == pytest.approx(0.6)
    assert found.stale_rate == pytest.approx(0.05)
    assert found.throughput_per_gpu == pytest.approx(400 / 300)
    assert found.produce_consume_ratio == pytest.approx(2.0)


def test_a_window_in_which_nothing_happened() -> None:
    found = report()
    assert found.production.accept_rate is None
    assert found.production.produce_consume_ratio is None
    assert found.decision == decide(0, None, 0, 0)
    assert found.nodes == []


def test_what_is_stale_does_not_move_the_decision() -> None:
    steps = [Step(11, 150.0, 40.0, 1.0)]
    many, none = (
        report(node("a", gpus=10, produced=100, consumed=40, stale=stale), steps=steps, entered=80).decision
        for stale in (60, 0)
    )
    assert many == none
    assert many.target == 6


def test_nodes_that_fail_or_fall_behind_are_suspect() -> None:
    found = report(
        node("a", produced=100, completed=50),
        node("b", gpus=2, produced=180, completed=90, failed=10),
        node("failing", produced=90, completed=3, failed=4),
        node("slow", gpus=4, produced=90, completed=50),
        node("gone", gone=True, produced=90),
    )
    states = {row.id: row.state for row in found.nodes}
    assert states == {"a": "healthy", "b": "healthy", "failing": "suspect", "slow": "suspect", "gone": "gone"}
    assert found.production.gpus == 8


def test_a_node_that_came_during_the_window_is_not_called_slow() -> None:
    known = {"a": Counts(), "b": Counts(produced=500)}
    nodes = (node("a", produced=100), node("b", produced=600), node("new", produced=1))
    found = report(*nodes, mark=Mark(time=100.0, version=10, nodes=known))
    assert [row.state for row in found.nodes] == ["healthy", "healthy", "healthy"]
    assert [row.produced for row in found.nodes] == [100, 100, 1]


def test_nodes_long_gone_have_no_row_but_are_remembered() -> None:
    gone = node("old", gone=True, seen=99.0, produced=70)
    left = node("left", gone=True, seen=101.0)
    found = report(gone, left)
    assert [row.id for row in found.nodes] == ["left"]
    assert mark_of(look(gone)).nodes["old"].produced == 70


@pytest.mark.parametrize(
    ("version", "gone", "active"), [(12, False, False), (11, False, False), (10, False, True), (None, False, True),
                                    (3, True, False)],
)  # fmt: skip
def test_weights_are_under_way_to_a_node_that_lags(version: int | None, gone: bool, active: bool) -> None:
    assert report(node("a"), node("b", version=version, gone=gone)).decision.weight_transfer is active


def test_a_report_goes_through_json() -> None:
    found = report(node("a", produced=3), steps=[Step(11, 150.0, 6.0, 2.0)])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


def test_the_reports_of_several_ledgers_are_one() -> None:
    steps = [Step(11, 150.0, 6.0, 2.0), Step(12, 180.0, 8.0, 0.0)]
    first = report(
        node("a", gpus=2, produced=60, accepted=60, consumed=30),
        node("b", gpus=2, produced=1, accepted=1),
        node("c", gone=True),
        steps=steps,
        rounds=[Span(100.0, 110.0)],
        entered=40,
    )
    second = report(
        node("a", gpus=2, produced=20, accepted=10, consumed=20),
        node("b", gpus=2, produced=19, accepted=19),
        node("c", gone=True),
        steps=steps,
        entered=60,
    )
    found = joined([Balance(latest=first, current=first), Balance(latest=None, current=second)])
    assert found.latest == first, "no other ledger has one yet"
    assert found.current.window == first.window, "every ledger has all steps, and the first one the evaluations"
    made = found.current.production
    assert (made.gpus, made.produced, made.entered, made.consumed) == (4, 100, 100, 50)
    assert (made.accept_rate, made.produce_consume_ratio, made.throughput_per_gpu) == (1.0, 2.0, 0.25)
    assert found.current.decision == decide(4, first.window.wait_fraction, 100, 50)
    assert [(one.id, one.produced, one.accepted, one.state) for one in found.current.nodes] == [
        ("a", 80, 70, "healthy"),
        ("b", 20, 20, "healthy"),
        ("c", 0, 0, "gone"),
    ]
