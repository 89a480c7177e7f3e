"""Rows become micro-batches under a budget, with common prefixes stored once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import CPU, branching, rows_of
from trainer_helpers import random_rows

from bench.tree import Case, make_rows
from rillflow.trainer.batches import Databuffer, Rows, no_rows
from rillflow.trainer.packing import (
    Forest,
    MicroBatch,
    grown,
    idle,
    input_length,
    micro_batches,
    pack,
    shared_with_previous,
    sorted_rows,
)
from soak import repetitions

ways = pytest.mark.parametrize("trees", [False, True])
orders = pytest.mark.parametrize("in_order", [False, True])


def made(rows: Rows, budget: int, **options: bool) -> list[MicroBatch]:
    return [make() for make in micro_batches(Databuffer(rows), ["mask_N"], budget, device=CPU, **options)]


def context(micro: MicroBatch, place: int) -> list[int]:
    """The tokens that the model has read at this place of P, walked segment by segment."""
    layout = micro.layout
    segment = int(np.searchsorted(layout.start_S, place, side="right") - 1)
    tokens = layout.tokens_P[int(layout.start_S[segment]) : place + 1].tolist()
    while (segment := int(layout.parent_S[segment])) >= 0:
        start = int(layout.start_S[segment])
        tokens = layout.tokens_P[start : start + int(layout.length_S[segment])].tolist() + tokens
    return tokens


@settings(max_examples=repetitions(40, 150), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200), st.booleans(), st.integers(0, 60))
def test_every_row_once_and_within_the_budget(lengths: list[int], budget: int, in_order: bool, shared: int) -> None:
    length_R = np.array(lengths, dtype=np.int64)
    shared_R = np.minimum(np.minimum(length_R, np.roll(length_R, 1)), shared)
    shared_R[0] = 0
    packs = pack(length_R, shared_R, budget, in_order=in_order)
    placed = np.concatenate(packs).tolist()
    assert sorted(placed) == list(range(len(lengths)))
    assert not in_order or placed == sorted(placed)
    again = pack(length_R, shared_R, budget, in_order=in_order)
    assert all(np.array_equal(a, b) for a, b in zip(packs, again, strict=True))


@ways
@orders
@pytest.mark.parametrize("budget", [1, 150, 100_000])
def test_only_a_row_alone_passes_the_budget(trees: bool, in_order: bool, budget: int) -> None:
    micros = made(branching(1, rows=30), budget, trees=trees, in_order=in_order)
    assert sum(micro.rows for micro in micros) == 30
    for micro in micros:
        assert micro.rows == 1 or len(micro.layout.tokens_P) <= budget
    assert budget != 100_000 or len(micros) == 1


def test_micro_batches_are_of_like_size() -> None:
    length_R = np.random.default_rng(0).integers(1, 100, 400)
    packs = pack(length_R, np.zeros_like(length_R), 2000)
    sizes = [int(length_R[rows].sum()) for rows in packs]
    assert len(packs) == -(-int(length_R.sum()) // 2000)
    assert max(sizes) - min(sizes) < 100


@ways
@orders
@pytest.mark.parametrize("on", [False, True])
def test_each_trained_token_is_behind_its_own_context(trees: bool, in_order: bool, on: bool) -> None:
    rows = branching(2)
    seen: list[int] = []
    for micro in made(rows, 300, trees=trees, in_order=in_order, on=on):
        for t, source in enumerate(micro.source_T.tolist()):
            row = int(np.searchsorted(rows.start_R, source, side="right") - 1)
            read = rows.tokens_N[rows.start_R[row] : source + on].tolist()
            assert context(micro, int(micro.select_T[t])) == read
            assert micro.layout.position_P[micro.select_T[t]] == len(read) - 1
            assert micro.target_T[t] == rows.tokens_N[source]
            assert micro.columns["old_T"][t] == rows.old_N[source]
            assert micro.columns["temperature_T"][t] == rows.temperature_N[source]
        assert micro.columns["mask_T"].dtype == torch.float32
        assert int(micro.row_T.max()) == micro.rows - 1
        seen += micro.source_T.tolist()
    assert sorted(seen) == np.flatnonzero(rows.mask_N).tolist()
    assert not in_order or seen == sorted(seen)


def test_tokens_of_one_row_come_in_order_and_under_one_number() -> None:
    rows = branching(3)
    for micro in made(rows, 300, trees=True):
        row_of = np.searchsorted(rows.start_R, micro.source_T, side="right")
        pairs = set(zip(row_of.tolist(), micro.row_T.tolist(), strict=True))
        assert len(pairs) == micro.rows
        assert (np.diff(micro.row_T.numpy()) >= 0).all()


def test_trees_read_less_and_put_rows_that_share_together() -> None:
    prompts = [np.random.default_rng(p).integers(0, 30, 50).tolist() for p in range(4)]
    answers = [[[row % 30, p, row // 5] * 4 for row in range(8)] for p in range(4)]
    tokens = [prompts[p] + answers[p][row] for row in range(8) for p in range(4)]  # groups are mixed up
    rows = rows_of(tokens, [[0] * 50 + [1] * 12 for _ in tokens])
    micros = made(rows, 150, trees=True)
    assert len(micros) == 4
    for micro in micros:
        assert len({int(s) // 62 % 4 for s in micro.source_T}) == 1
        assert len(micro.layout.tokens_P) == 50 + 8 * 11
    flat = sum(len(micro.layout.tokens_P) for micro in made(rows, 150))
    assert flat == 32 * 61


def test_rows_that_train_nothing_are_left_out() -> None:
    rows = rows_of([[1, 2, 3], [4, 5, 6], [7, 8]], [[0, 0, 1], [0, 0, 0], [0, 1]])
    (micro,) = made(rows, 100, in_order=True)
    assert micro.rows == 2
    assert micro.layout.tokens_P.tolist() == [1, 2, 7]
    assert input_length(rows).tolist() == [2, 0, 1]
    assert input_length(rows, on=True).tolist() == [3, 0, 2]


@ways
def test_no_rows_make_no_micro_batches(trees: bool) -> None:
    assert made(no_rows(), 100, trees=trees) == []
    assert made(random_rows(0).masked(np.zeros(12, dtype=bool)), 100, trees=trees) == []


def test_an_idle_micro_batch_has_the_columns_of_any_other() -> None:
    micro = idle(["advantage_N"], CPU)
    assert {name: column.tolist() for name, column in micro.columns.items()} == {
        "old_T": [0.0],
        "temperature_T": [1.0],
        "advantage_T": [0.0],
    }
    assert micro.layout.tokens_P.tolist() == [0]


few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    length_R = np.array([len(row) for row in rows], dtype=np.int64)
    return np.concatenate([np.array(row, dtype=np.int32) for row in rows]), np.cumsum(length_R) - length_R, length_R


def packed(forest: Forest, rows: list[list[int]]) -> list[int]:
    """The tokens of P."""
    return [token for row, fork in zip(rows, forest.fork_R, strict=True) for token in row[fork:]]


@settings(max_examples=repetitions(40, 120), deadline=None)
@given(few_tokens, st.booleans(), st.integers(1, 4))
def test_every_token_of_every_row_is_found(rows: list[list[int]], in_order: bool, worthwhile: int) -> None:
    tokens_N, start_R, length_R = flat(rows)
    order = np.arange(len(rows)) if in_order else sorted_rows(tokens_N, start_R, length_R)
    rows = [rows[r] for r in order]
    shared_R = shared_with_previous(tokens_N, start_R[order], length_R[order])
    forest = grown(length_R[order], shared_R, worthwhile)
    tokens_P = packed(forest, rows)
    assert forest.tokens == len(tokens_P)
    for number, row in enumerate(rows):
        at = forest.locate(np.full(len(row), number), np.arange(len(row)))
        assert [tokens_P[place] for place in at] == row


@settings(max_examples=repetitions(40, 120), deadline=None)
@given(few_tokens)
def test_sorted_rows_make_the_smallest_forest(rows: list[list[int]]) -> None:
    tokens_N, start_R, length_R = flat(rows)
    order = sorted_rows(tokens_N, start_R, length_R)
    assert [rows[r] for r in order] == sorted(rows)
    forest = grown(length_R[order], shared_with_previous(tokens_N, start_R[order], length_R[order]), 1)
    assert forest.tokens == len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


@settings(max_examples=repetitions(40, 120), deadline=None)
@given(few_tokens, st.booleans(), st.integers(1, 4))
def test_segments_tile_the_pack_depth_first(rows: list[list[int]], in_order: bool, worthwhile: int) -> None:
    tokens_N, start_R, length_R = flat(rows)
    order = np.arange(len(rows)) if in_order else sorted_rows(tokens_N, start_R, length_R)
    shared_R = shared_with_previous(tokens_N, start_R[order], length_R[order])
    forest = grown(length_R[order], shared_R, worthwhile)
    start_S, length_S, parent_S = forest.segments()
    assert (length_S > 0).all()
    assert np.array_equal(start_S, np.cumsum(length_S) - length_S)
    assert start_S[-1] + length_S[-1] == forest.tokens
    assert (parent_S < np.arange(len(parent_S))).all()
    for number, length in enumerate(length_R[order].tolist()):
        last = forest.locate(np.array([number]), np.array([length - 1]))[0]
        path = path_to(int(np.searchsorted(start_S, last, side="right") - 1), parent_S)
        places = [start_S[s] + i for s in path for i in range(length_S[s])]
        expected = forest.locate(np.full(length, number), np.arange(length)).tolist()
        assert places[:length] == expected


def path_to(segment: int, parent_S: np.ndarray) -> list[int]:
    return [] if segment < 0 else [*path_to(int(parent_S[segment]), parent_S), segment]


def test_short_common_beginnings_are_not_worth_a_segment() -> None:
    forest = grown(np.array([20, 20, 20]), np.array([0, 3, 12]), worthwhile=4)
    assert forest.fork_R.tolist() == [0, 0, 12]
    assert forest.parent_R.tolist() == [-1, -1, 1]


def test_rows_that_end_within_others_add_nothing() -> None:
    rows = sorted([[1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3, 4]])
    tokens_N, start_R, length_R = flat(rows)
    forest = grown(length_R, shared_with_previous(tokens_N, start_R, length_R), 1)
    assert forest.tokens == 4
    assert packed(forest, rows) == [1, 2, 3, 4]


def test_rows_that_go_on_from_each_other_are_one_segment() -> None:
    """The calls of one conversation are such rows: the tokens have no branch, so their attention is one causal pass."""
    long = list(range(100))
    rows = [long[:30], long[:50], long[:70], [*long[:70], 7, 8, 9], long]
    tokens_N, start_R, length_R = flat(rows)
    forest = grown(length_R[:3], shared_with_previous(tokens_N, start_R[:3], length_R[:3]))
    assert [part.tolist() for part in forest.segments()] == [[0], [70], [-1]]
    forest = grown(length_R, shared_with_previous(tokens_N, start_R, length_R))
    assert [part.tolist() for part in forest.segments()] == [[0, 70, 73], [70, 3, 30], [-1, 0, 0]]


def test_its_rows_share_what_they_say() -> None:
    data = Databuffer(make_rows(Case(0.5, 100, 4, 2), 50))
    (make,) = micro_batches(data, [], 1 << 20, device=torch.device("cpu"), trees=True)
    assert len(make().layout.tokens_P) == 2 * (50 + 4 * 49)
