"""Rows of a decode step are read in stretches: every row once, as far as it goes, and cheaper so."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from rillflow.engine.embedded.cache import KVCache
from rillflow.engine.embedded.stretches import Stretch, stretches

Extents = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def cost(made: list[Stretch], call: int) -> int:
    return sum((rows.stop - rows.start) * extent + call for rows, extent in made)


@given(Extents, st.integers(0, 500))
def test_every_row_is_in_one_stretch_that_is_as_long_as_its_longest_row(extents: list[int], call: int) -> None:
    made = stretches(extents, call)
    assert [row for rows, _ in made for row in range(rows.start, rows.stop)] == list(range(len(extents)))
    assert all(extent == max(extents[rows]) for rows, extent in made)


@given(Extents, st.integers(0, 500))
def test_each_split_costs_no_more_than_it_saves_and_a_call(extents: list[int], call: int) -> None:
    made = stretches(extents, call)
    assert cost(made, call) <= len(extents) * max(extents) + call * len(made)


def test_of_long_tailed_lengths_they_are_near_the_best_there_is() -> None:
    draws = random.Random(5)
    batches = [[min(900, max(4, round(85 * math.exp(draws.gauss(0, 1))))) for _ in range(24)] for _ in range(200)]
    taken, least, at_once = (
        sum(price(batch) for batch in batches)
        for price in (lambda batch: cost(stretches(batch, 240), 240), best, lambda batch: len(batch) * max(batch) + 240)
    )
    assert taken < 1.2 * least
    assert taken < 0.5 * at_once


def best(extents: list[int], call: int = 240) -> int:
    """Of all ways to cut the rows."""
    cheapest = [0]
    for end in range(1, len(extents) + 1):
        cheapest.append(min(cheapest[begin] + (end - begin) * max(extents[begin:end]) + call for begin in range(end)))
    return cheapest[-1]


def test_a_long_row_among_short_ones_is_read_alone() -> None:
    assert stretches([50, 60, 900, 40, 70], 240) == [
        Stretch(slice(0, 2), 60),
        Stretch(slice(2, 3), 900),
        Stretch(slice(3, 5), 70),
    ]


def test_a_long_tail_ends_a_stretch_though_no_row_alone_would() -> None:
    assert stretches([250] + [100] * 8, 240) == [Stretch(slice(0, 1), 250), Stretch(slice(1, 9), 100)]


def test_rows_that_are_alike_are_read_at_once() -> None:
    assert stretches(range(100, 110), 240) == [Stretch(slice(0, 10), 109)]


def test_what_is_read_does_not_depend_on_the_stretches() -> None:
    torch.manual_seed(0)
    cache = KVCache(
        layers=1, slots=4, heads=2, context=600, head_size=8, dtype=torch.float32, device=torch.device("cpu")
    )
    key, value = cache.read_rows(0, slice(0, 4), 600)
    key.copy_(torch.randn_like(key))
    value.copy_(torch.randn_like(value))
    part, _ = cache.read_rows(0, slice(2, 3), 10)
    assert torch.equal(part, key[2:3, :, :10])
