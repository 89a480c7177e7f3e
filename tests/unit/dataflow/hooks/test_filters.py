from __future__ import annotations

import pytest
from hook_groups import Played, prompt

from rillflow.dataflow.hooks.filters import LengthBand, Overlong, Staleness, ZeroVariance


def group(**fields):
    return Played(prompt("p"), **({"rewards": [0.0, 1.0]} | fields))


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [([1.0, 1.0], "zero_variance"), ([0.0, 1.0], True), ([1.0], True), ([0, 0, 0], "zero_variance")],
)
def test_zero_variance(rewards, verdict):
    assert ZeroVariance().keep(group(rewards=rewards)) == verdict


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [([0.5, 0.5009], "zero_variance"), ([0.5, 0.503], True), ([0.7], True), ([0.2, 0.2], "zero_variance")],
)
def test_zero_variance_of_a_models_scores(rewards, verdict):
    assert ZeroVariance(least=1e-3).keep(group(rewards=rewards)) == verdict


@pytest.mark.parametrize(
    ("share", "cut", "verdict"), [(0.5, 2, True), (0.5, 3, "overlong"), (0, 1, "overlong"), (0, 0, True), (1, 4, True)]
)
def test_overlong(share, cut, verdict):
    assert Overlong(share=share).keep(group(truncated=[place < cut for place in range(4)])) == verdict


@pytest.mark.parametrize(("staleness", "verdict"), [(0, True), (2, True), (3, "stale")])
def test_staleness(staleness, verdict):
    assert Staleness(most=2).keep(group(staleness=staleness)) == verdict


@pytest.mark.parametrize(
    ("lengths", "verdict"), [([10, 20], True), ([9, 10], "too_short"), ([19, 22], "too_long"), ([5, 30], True)]
)
def test_length_band(lengths, verdict):
    assert LengthBand(shortest=10, longest=20).keep(group(lengths=lengths)) == verdict


def test_a_length_band_without_an_upper_end():
    assert LengthBand().keep(group(lengths=[10**9])) is True
