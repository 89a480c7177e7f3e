"""Rows as a forest: nothing is lost, and what is shared is there once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.trainer.forest import Forest, grown, shared_with_previous, sorted_rows

few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    length_R = np.array([len(row) for row in rows], dtype=np.int64)
    return np.concatenate([np.array(row, dtype=np.int32) for row in rows]), np.cumsum(length_R) - length_R, length_R


def packed(forest: Forest, rows: list[list[int]]) -> list[int]:
    """The tokens of P."""
    return [token for row, fork in zip(rows, forest.fork_R, strict=True) for token in row[fork:]]


@settings(max_examples=120, deadline=None)
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


@settings(max_examples=120, deadline=None)
@given(few_tokens)
def test_sorted_rows_make_the_smallest_forest(rows: list[list[int]]) -> None:
    tokens_N, start_R, length_R = flat(rows)
    order = sorted_rows(tokens_N, start_R, length_R)
    assert [rows[r] for r in order] == sorted(rows)
    forest = grown(length_R[order], shared_with_previous(tokens_N, start_R[order], length_R[order]), 1)
    assert forest.tokens == len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


@settings(max_examples=120, deadline=None)
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
    """As the calls of one conversation do: what is read has no branch, so its attention is one causal pass."""
    long = list(range(100))
    rows = [long[:30], long[:50], long[:70], [*long[:70], 7, 8, 9], long]
    tokens_N, start_R, length_R = flat(rows)
    forest = grown(length_R[:3], shared_with_previous(tokens_N, start_R[:3], length_R[:3]))
    assert [part.tolist() for part in forest.segments()] == [[0], [70], [-1]]
    forest = grown(length_R, shared_with_previous(tokens_N, start_R, length_R))
    assert [part.tolist() for part in forest.segments()] == [[0, 70, 73], [70, 3, 30], [-1, 0, 0]]
