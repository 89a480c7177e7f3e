"""Batches of static data: the same for any number of ranks, each row once an epoch, and an exact cursor."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import DataError
from rillflow.trainer.parallel.dataloader import StaticBatches, balanced
from rillflow.trainer.parallel.peers import Alone


class Rank(Alone):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


sets = st.tuples(st.integers(1, 60), st.integers(1, 17), st.integers(0, 2**40))


@settings(max_examples=60, deadline=None)
@given(of=sets, ranks=st.integers(1, 9), seed=st.integers(0, 9))
def test_parts_of_all_ranks_are_the_batch_whatever_their_number(
    of: tuple[int, int, int], ranks: int, seed: int
) -> None:
    count, size, _ = of
    lengths = np.random.default_rng(seed).integers(1, 500, count).tolist()
    alone = StaticBatches(*of, lengths=lengths)
    several = [StaticBatches(*of, Rank(rank, ranks), lengths) for rank in range(ranks)]
    for step in range(2 * alone.batches_per_epoch + 1):
        parts = [one.take(step) for one in several]
        assert sorted(np.concatenate(parts).tolist()) == sorted(alone.take(step).tolist())
        tokens = [sum(lengths[row] for row in part) for part in parts]
        assert max(tokens) - min(tokens) <= max(lengths[row] for row in alone.batch(step))
        assert 1 <= len(alone.batch(step)) <= size


@settings(max_examples=60, deadline=None)
@given(of=sets)
def test_every_row_comes_once_an_epoch(of: tuple[int, int, int]) -> None:
    loader = StaticBatches(*of)
    for epoch in range(2):
        steps = range(epoch * loader.batches_per_epoch, (epoch + 1) * loader.batches_per_epoch)
        assert {loader.epoch(step) for step in steps} == {epoch}
        rows = np.concatenate([loader.batch(step) for step in steps])
        assert sorted(rows.tolist()) == list(range(of[0]))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    loader = StaticBatches(1000, 1000, 3)
    assert loader.batch(0).tolist() != loader.batch(1).tolist()
    assert loader.batch(0).tolist() == StaticBatches(1000, 1000, 3).batch(0).tolist()
    assert loader.batch(0).tolist() != StaticBatches(1000, 1000, 4).batch(0).tolist()


@settings(max_examples=40, deadline=None)
@given(of=sets, done=st.integers(0, 30))
def test_a_restored_cursor_goes_on_exactly_on_other_ranks_too(of: tuple[int, int, int], done: int) -> None:
    first = StaticBatches(*of)
    for _ in islice(first, done):
        pass
    state = first.state()
    assert state["step"] == done
    expected = [sorted(batch.tolist()) for batch in islice(first, 5)]
    again = [StaticBatches(*of, Rank(rank, 2)) for rank in range(2)]
    for one in again:
        one.restore(state)
    parts = zip(*(islice(one, 5) for one in again), strict=True)
    assert [sorted(np.concatenate(both).tolist()) for both in parts] == expected


@pytest.mark.parametrize("other", [(11, 4, 0), (10, 5, 0), (10, 4, 1)])
def test_a_cursor_of_other_data_is_refused(other: tuple[int, int, int]) -> None:
    with pytest.raises(DataError, match="the data has changed"):
        StaticBatches(10, 4, 0).restore(StaticBatches(*other).state())


@pytest.mark.parametrize(("count", "size", "lengths"), [(0, 4, None), (4, 0, None), (4, 2, [1, 2])])
def test_impossible_sets_are_refused(count: int, size: int, lengths: list[int] | None) -> None:
    with pytest.raises(DataError):
        StaticBatches(count, size, 0, lengths=lengths)


def test_more_ranks_than_rows_leave_some_without() -> None:
    assert sorted(balanced(np.array([5, 5]), 4).tolist()) == [0, 1]
    assert [len(StaticBatches(2, 2, 0, Rank(rank, 4)).take(0)) for rank in range(4)] == [1, 1, 0, 0]
