"""Rows of a decode step are read in stretches: every row once, as far as it goes, and cheaper so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rillflow.engine.embedded import cache as cache_module
from rillflow.engine.embedded.cache import Stretch, stretches
from rillflow.engine.embedded.forward import make_forward

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
    """The cost of the best of all ways to cut the rows."""
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


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("call", "several"), [(0, True), (1 << 40, False)])
def test_a_step_in_stretches_gives_what_the_model_gives(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str, call: int, several: bool
) -> None:
    monkeypatch.setattr(cache_module, "_CALL", call)
    lengths = [5, 90, 7, 40]
    rows = [torch.randint(0, 97, (length + 1,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    plain = make_model(family).double()
    with torch.inference_mode():
        expected = torch.stack([plain(row[None]).logits[0, -1] for row in rows])
        model = make_model(family).double()
        cache = cache_module.make_cache(model, 4, 200)
        forward = make_forward(model, cache)
        for slot, row in enumerate(rows):
            ids, zero = row[None, :-1].numpy(), np.zeros(1, np.int64)
            forward(cache.prefill_batch(np.array([slot]), ids, zero, np.array([len(row) - 1])))
        last = np.array([int(row[-1]) for row in rows])
        batch = cache.decode_batch(last, np.array(lengths), np.ones(4, np.bool_))
        assert (len(batch.stretches) > 1) is several
        torch.testing.assert_close(forward(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_a_step_gives_what_the_model_gives(make_model: Callable[..., Any], family: str) -> None:
    """Also beside a row that is not ready, which changes nothing of its own."""
    lengths = [5, 90, 7, 40]
    rows = [torch.randint(0, 97, (length + 1,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    model = make_model(family)
    with torch.inference_mode():
        expected = torch.stack([model(row[None]).logits[0, -1] for row in rows])
        cache = cache_module.make_cache(model, 4, 200)
        forward = make_forward(model, cache)
        for slot, row in enumerate(rows):
            ids, zero = row[None, :-1].numpy(), np.zeros(1, np.int64)
            forward(cache.prefill_batch(np.array([slot]), ids, zero, np.array([len(row) - 1])))
        last, ready = np.array([int(row[-1]) for row in rows]), np.array([True, True, False, True])
        kept = cache._kv_L2SKCD[:, :, 2, :, : cache.context].clone()
        batch = cache.decode_batch(last, np.where(ready, lengths, 0), ready)
        assert (batch.columns is not None) is (batch.mask_RTE is None) is (family != "mistral")
        torch.testing.assert_close(forward(batch)[ready], expected[ready], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache._kv_L2SKCD[:, :, 2, :, : cache.context], kept)
