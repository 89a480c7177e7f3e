"""Collectives of ranks: the same answers everywhere, and no rank left hanging."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer_threads import as_peers
from rillflow.clients.payloads import DamagedRows
from rillflow.errors import CorruptData, LeaseLost, RunError
from rillflow.trainer.parallel import Alone, GivenUp, PeerLost, Stopped
from rillflow.trainer.parallel.distributed import Distributed
from rillflow.types import Row


def bits(values: list[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.floats(-1e300, 1e300), min_size=3, max_size=3), min_size=ranks, max_size=ranks
        )
    )
)
def test_sums_and_maxima_are_the_same_bits_on_every_rank(rows: list[list[float]]) -> None:
    def work(peers: Distributed) -> tuple[list[float], list[float]]:
        return peers.total(rows[peers.rank]), peers.highest(rows[peers.rank])

    answers = as_peers(len(rows), work)
    assert len({(bits(total), bits(highest)) for total, highest in answers}) == 1
    assert answers[0][1] == [max(column) for column in zip(*rows, strict=True)]
    exact = [math.fsum(column) for column in zip(*rows, strict=True)]
    scale = max(abs(value) for row in rows for value in row)
    assert answers[0][0] == pytest.approx(exact, rel=1e-12, abs=1e-12 * scale)


@pytest.mark.parametrize("size", [0, 1, 1000, 1013, 1014, 1015, 5000, 3_000_000])
def test_messages_of_any_size_arrive(size: int) -> None:
    """Around and beyond what fits into the frame of a meeting."""

    def work(peers: Distributed) -> tuple[bytes, list[bytes]]:
        own = bytes([peers.rank + 1]) * (size * peers.rank // 2)
        return peers.first(bytes([7]) * size), peers.everyone(own)

    for first, everyone in as_peers(3, work):
        assert first == bytes([7]) * size
        assert everyone == [b"", b"\2" * (size // 2), b"\3" * size]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_an_exchange_gives_everybody_what_was_meant_for_it(ranks: int) -> None:
    def work(peers: Distributed) -> list[bytes]:
        return peers.exchange([f"{peers.rank}>{to} ".encode() * (peers.rank * to * 100) for to in range(ranks)])

    for rank, answer in enumerate(as_peers(ranks, work)):
        assert answer == [f"{of}>{rank} ".encode() * (of * rank * 100) for of in range(ranks)]


def test_an_exchange_of_nothing() -> None:
    assert as_peers(2, lambda peers: peers.exchange([b"", memoryview(b"")])) == [[b"", b""]] * 2


def test_tensors_of_all_kinds_become_their_sums_in_place() -> None:
    def work(peers: Distributed) -> list[torch.Tensor]:
        own = torch.Generator().manual_seed(peers.rank)
        tensors = [
            torch.randn(7, 3, generator=own),
            torch.randn(5, generator=own),
            torch.randn(4, 6, generator=own).t(),  # not contiguous
            torch.randn(3, generator=own).to(torch.bfloat16),
            torch.randn(2, generator=own, dtype=torch.float64),
            torch.randn((), generator=own),
        ]
        before = [tensor.data_ptr() for tensor in tensors]
        peers.add(tensors)
        assert [tensor.data_ptr() for tensor in tensors] == before
        return tensors

    first, second, third = as_peers(3, work)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    expected = sum(torch.randn(7, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3))
    torch.testing.assert_close(first[0], expected)


# ---------------------------------------------------------------- errors


def test_an_error_is_raised_on_all_ranks_wherever_they_are() -> None:
    damaged = DamagedRows([Row(unit="u", segment=0, offset=0, length=1)], CorruptData("a bit has flipped", "hint"))

    calls: list[Callable[[Distributed], object]] = [
        lambda peers: peers.add([torch.ones(3)]),
        lambda peers: peers.agree(damaged),
        lambda peers: peers.total([1.0]),
    ]

    def work(peers: Distributed) -> BaseException:
        with pytest.raises((DamagedRows, GivenUp)) as caught:
            calls[peers.rank](peers)
        assert peers.total([1.0]) == [3.0]  # they go on together afterwards
        return caught.value

    zero, one, two = as_peers(3, work)
    assert one is damaged
    for other in (zero, two):
        assert isinstance(other, LeaseLost)
        assert "rank 1 gave up" in str(other)
        assert "a bit has flipped" in str(other)


def test_who_was_asked_to_stop_decides_before_any_other_error() -> None:
    def work(peers: Distributed) -> None:
        with pytest.raises(Stopped):
            peers.agree({0: LeaseLost("gone"), 2: Stopped()}.get(peers.rank))

    as_peers(3, work)


def test_a_long_error_is_cut_not_broken() -> None:
    def work(peers: Distributed) -> str:
        with pytest.raises(LeaseLost) as caught:
            peers.agree(LeaseLost("ü" * 100_000, "ß" * 100_000) if peers.rank else None)
        return str(caught.value)

    assert as_peers(2, work)[0].startswith("rank 1 gave up: üüü")


def test_agreeing_without_an_error_is_nothing() -> None:
    assert as_peers(2, lambda peers: peers.agree(None)) == [None, None]
    Alone().agree(None)
    with pytest.raises(LeaseLost):
        Alone().agree(LeaseLost("gone"))


def test_ranks_that_are_out_of_step_are_told_where_each_is() -> None:
    def work(peers: Distributed) -> None:
        with pytest.raises(RunError, match="rank 0 at `first`, rank 1 at `total`"):
            _ = peers.total([1.0]) if peers.rank else peers.first(b"")

    as_peers(2, work)


def test_values_of_different_counts_are_refused() -> None:
    def work(peers: Distributed) -> None:
        with pytest.raises(RunError, match="out of step"):
            peers.total([1.0] * (peers.rank + 1))
        with pytest.raises(RunError, match="different tensors"):
            peers.add([torch.ones(peers.rank + 1)])

    as_peers(2, work)


def test_a_rank_that_never_comes_ends_the_wait_at_its_deadline() -> None:
    over = threading.Event()

    def work(peers: Distributed) -> None:
        if peers.rank:
            over.wait(30.0)
            return
        with pytest.raises(PeerLost, match="rank 0 of 2 lost its peers at `total`"):
            peers.total([1.0])
        over.set()

    as_peers(2, work, seconds=0.5)
