"""Databuffers between stages of different sizes: element by element, in order, balanced, and no more than needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer_threads import as_peers
from rillflow.errors import GraphError
from rillflow.trainer.batches import Databuffer, Rows, from_columns, joined, no_rows
from rillflow.trainer.parallel import Alone
from rillflow.trainer.parallel.distributed import Distributed
from rillflow.trainer.parallel.redistribute import Redistribution, holders
from soak import repetitions

MADE = {
    "advantage_N": np.float32, "value_N": np.float64, "seen_N": np.bool_, "agent_R": np.dtype("<U12"),
    "place_R": np.int8, "big_R": np.uint64, "half_N": np.float16,
}  # fmt: skip


def data_of(lengths: list[int], seed: int = 0) -> Databuffer:
    """Rows of these lengths with a column of every kind, all values random."""
    rng = np.random.default_rng(seed)
    start = no_rows()
    columns: dict[str, Any] = {"length_R": np.array(lengths, np.int64)}
    like = {name: getattr(start, name).dtype for name in Rows.__dataclass_fields__ if name != "start_R"} | MADE
    for name, dtype in like.items():
        size = sum(lengths) if name.endswith("_N") else len(lengths)
        if name == "agent_R":
            columns[name] = np.array([f"agent {n}" for n in rng.integers(0, 99, size)], dtype)
        elif name != "length_R":
            columns[name] = np.asarray(rng.integers(0, 200, size) * 0.37, dtype)
    return from_columns(columns)


def cut(data: Databuffer, sizes: list[int], peers: Distributed) -> Databuffer:
    """Return the rows that a rank holds, given the number of rows of each holder."""
    own = holders(len(sizes), peers.size)
    place = own.index(peers.rank) if peers.rank in own else -1
    begin = sum(sizes[: max(place, 0)])
    return data.taking(np.arange(begin, begin + (sizes[place] if place >= 0 else 0)))


def assert_same(got: Databuffer, expected: Databuffer) -> None:
    assert set(got.names) == set(expected.names)
    for name in expected.names:
        assert got[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
    np.testing.assert_array_equal(got.rows.start_R, expected.rows.start_R)


@pytest.mark.parametrize(("now", "to"), [(2, 4), (4, 2), (4, 1), (1, 4), (3, 2), (4, 3)])
def test_every_element_arrives_in_order_and_back_again(now: int, to: int) -> None:
    whole = data_of([5, 1, 9, 3, 3, 17, 2, 8, 4, 1, 6])
    sizes = {1: [11], 2: [4, 7], 3: [1, 4, 6], 4: [3, 0, 6, 2]}[now]

    def work(peers: Distributed) -> tuple[Databuffer, Databuffer]:
        moves = Redistribution(peers)
        there = moves.move(cut(whole, sizes, peers), now, to)
        return there, moves.move(there, to, now)

    there, back = zip(*as_peers(4, work), strict=True)
    assert_same(joined([part for part in there if len(part)]), whole)
    assert_same(joined([part for part in back if len(part)]), whole)
    for parts, held in ((there, to), (back, now)):
        assert all(len(part) == 0 for rank, part in enumerate(parts) if rank not in holders(held, 4))
        tokens = [int(parts[rank].rows.length_R.sum()) for rank in holders(held, 4)]
        assert max(tokens) - min(tokens) <= 2 * 17  # a row goes where its middle lies


@settings(max_examples=repetitions(6, 30), deadline=None)
@given(
    held=st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=4),
    to=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_distribution_keeps_the_global_order(held: list[list[int]], to: int, seed: int) -> None:
    whole = data_of([length for rank in held for length in rank], seed)
    sizes = [len(rank) for rank in held]

    def work(peers: Distributed) -> Databuffer:
        return Redistribution(peers).move(cut(whole, sizes, peers), len(held), to)

    parts = as_peers(4, work)
    assert_same(joined(parts), whole)


def test_equal_sizes_move_nothing() -> None:
    data = data_of([3, 4])
    moves = Redistribution(Alone())
    assert moves.move(data, 1, 1) is data

    def work(peers: Distributed) -> tuple[bool, int, int]:
        moves = Redistribution(peers)
        return moves.move(data, 2, 2) is data, moves.sent, moves.received

    assert as_peers(2, work) == [(True, 0, 0)] * 2


def test_what_has_moved_can_be_written_to() -> None:
    """Torch warns of arrays that it cannot write to."""

    def work(peers: Distributed) -> None:
        data = data_of([3, 4]) if peers.rank == 0 else data_of([])
        moved = Redistribution(peers).move(data, 1, 2)
        torch.from_numpy(moved["advantage_N"]).add_(1)

    as_peers(2, work)


def test_bytes_through_the_busiest_rank_fall_with_the_number_of_ranks() -> None:
    """One total, half of the ranks to all of them and back: twice the ranks, half the bytes through each."""
    whole = data_of([64] * 256)
    total = sum(whole[name].nbytes for name in whole.names)
    busiest: dict[int, int] = {}
    for ranks in (2, 4, 8):

        def work(peers: Distributed, half: int = ranks // 2) -> int:
            moves = Redistribution(peers)
            there = moves.move(cut(whole, [256 // half] * half, peers), half, peers.size)
            moves.move(there, peers.size, half)
            return moves.sent + moves.received

        busiest[ranks] = max(as_peers(ranks, work))
    for ranks, through in busiest.items():
        assert through * ranks == pytest.approx(busiest[2] * 2, rel=0.05)
        assert through == pytest.approx(2 * total / ranks, rel=0.05)  # half of a holder's rows, there and back


@pytest.mark.parametrize(("now", "to"), [(0, 2), (2, 3), (3, 1)])
def test_impossible_stages_are_refused(now: int, to: int) -> None:
    def work(peers: Distributed) -> None:
        with pytest.raises(GraphError, match="cannot move"):
            Redistribution(peers).move(data_of([1]), now, to)

    as_peers(2, work)


def test_rows_outside_of_their_stage_are_refused() -> None:
    def work(peers: Distributed) -> None:
        if peers.rank:
            with pytest.raises(GraphError, match="rank 1 holds rows in a stage of 1 ranks"):
                Redistribution(peers).move(data_of([1]), 1, 2)

    as_peers(2, work)


def test_objects_do_not_travel() -> None:
    def work(peers: Distributed) -> None:
        data = data_of([1, 1]).adding({"thing_R": np.array([object(), object()])})
        if peers.rank == 0:
            with pytest.raises(GraphError, match="Python objects"):
                Redistribution(peers).move(data, 1, 2)
        else:
            peers.everyone(b"\0")

    as_peers(2, work)
