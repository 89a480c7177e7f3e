"""Train priorities: who trains, by the roofline; and the measurement itself."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.config import load_recipe
from rillflow.errors import RunError
from rillflow.resources.workers import (
    DECODE_INTENSITY,
    Roofline,
    initial_workers,
    measure,
    measure_apart,
    measured,
    remeasured,
    with_rooflines,
)

NUMBERS = st.floats(0.01, 1e5)
ABOVE = st.floats(1.01, 100.0)


@given(tflops=NUMBERS, bandwidth=NUMBERS, more=ABOVE, less=ABOVE)
def test_high_compute_and_low_bandwidth_trains(tflops: float, bandwidth: float, more: float, less: float) -> None:
    plays = Roofline(tflops, bandwidth)
    assert Roofline(tflops * more, bandwidth / less).train_priority > plays.train_priority


@given(tflops=NUMBERS, bandwidth=NUMBERS, more=ABOVE)
def test_more_compute_is_always_better_suited_and_more_bandwidth_never(
    tflops: float, bandwidth: float, more: float
) -> None:
    one = Roofline(tflops, bandwidth).train_priority
    assert Roofline(tflops * more, bandwidth).train_priority > one
    assert Roofline(tflops, bandwidth * more).train_priority <= one
    assert Roofline(tflops * more, bandwidth * more).train_priority > one, "of two alike the larger"


def test_the_roofline_has_its_ridge() -> None:
    roofline = Roofline(tflops=100.0, bandwidth=2000.0)
    assert roofline.ridge == 50.0
    assert roofline.attainable(roofline.ridge) == roofline.attainable(1e6) == 100.0
    assert roofline.attainable(DECODE_INTENSITY) == 16.0
    assert roofline.train_priority == 100.0 * 100.0 / 16.0


def test_real_devices_are_ordered_as_their_makers_mean_them() -> None:
    """Dense bf16 TFLOP/s and GB/s: of two with the same compute the one with less bandwidth trains."""
    h100, h20, l40s = Roofline(989, 3350), Roofline(148, 4000), Roofline(362, 864)
    assert h100.train_priority > l40s.train_priority > h20.train_priority


def test_this_machine_is_measured() -> None:
    found = measure(threads=1)
    assert 0 < found.tflops < 1e6
    assert 0 < found.bandwidth < 1e6


def test_a_machine_that_cannot_be_measured_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("measure", 60)

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(RunError, match="could not be measured") as caught:
        measure_apart(1)
    assert "declare tflops and bandwidth" in caught.value.hint


MORE = ["resources.workers=[{tags: [train], count: 2}, {tags: [rollout, train], tflops: 5, bandwidth: 7}]"]


def test_only_a_choice_is_worth_a_measurement() -> None:
    def never(threads: int) -> Roofline:
        raise AssertionError("measured")

    plain = load_recipe("quickstart")
    assert measured(plain, initial_workers(plain), never) == initial_workers(plain)
    known = "{tags: [train], count: 2, tflops: 5, bandwidth: 7}"
    declared = load_recipe("quickstart", [f"resources.workers=[{known}, {{tags: [rollout]}}]"])
    assert measured(declared, initial_workers(declared), never) == initial_workers(declared), "all candidates are known"


def test_what_is_declared_is_not_measured_away() -> None:
    recipe = load_recipe("quickstart", MORE)
    workers = measured(recipe, initial_workers(recipe), lambda threads: Roofline(1.0, 2.0))
    assert [(w.tflops, w.bandwidth) for w in workers] == [(1.0, 2.0), (1.0, 2.0), (5.0, 7.0)]
    again = remeasured(recipe, workers, lambda threads: Roofline(3.0, 4.0))
    assert [(w.tflops, w.bandwidth) for w in again] == [(3.0, 4.0), (3.0, 4.0), (5.0, 7.0)]
    assert with_rooflines(initial_workers(recipe), again) == again


def test_without_a_measurement_the_order_of_the_recipe_decides() -> None:
    recipe = load_recipe("quickstart", MORE)

    def fails(threads: int) -> Roofline:
        raise RunError("no torch")

    assert measured(recipe, initial_workers(recipe), fails) == initial_workers(recipe)
