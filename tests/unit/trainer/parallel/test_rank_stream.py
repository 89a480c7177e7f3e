"""The stream of several ranks: own rows, the same news, and errors that no rank keeps to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from peer_threads import as_peers
from rillflow.clients.payloads import DamagedRows
from rillflow.errors import CorruptData, LeaseLost
from rillflow.trainer.batches import Rows, no_rows
from rillflow.trainer.parallel import Stopped
from rillflow.trainer.parallel.distributed import Distributed
from rillflow.trainer.stream import RankStream
from rillflow.types import Batch, BatchReply, BatchSample, Row

RANKS = 3


def sample(member: int, rank: int) -> BatchSample:
    return BatchSample(
        id=f"{member}.{rank}", row=Row(unit="u", segment=0, offset=rank, length=1), tokens=2, trained=1, reward=0.0,
        group=f"g{member}", group_mean=0.0, group_std=1.0, group_size=3, staleness=0, truncated=False, member=member,
    )  # fmt: skip


class Ledger:
    """What all ranks ask: a batch of groups, one sample of each for every rank. It may grow at any moment."""

    def __init__(self, groups: int, *, wanted: int = 4) -> None:
        self.groups = groups
        self.wanted = wanted
        self.asked: list[tuple[int, str, float, int]] = []
        self.on_ask: Callable[[int], None] = lambda rank: None

    def lease(self, rank: int, attempt: str, wait: float, have: int) -> BatchReply:
        self.asked.append((rank, attempt, wait, have))
        self.on_ask(rank)
        if self.groups <= have:
            return BatchReply(batch=None, phase="training", waiting_for="samples")
        batch = Batch(
            id="b", attempt=attempt, policy="p", version=3, seconds=60.0, groups=self.groups,
            samples=[sample(member, rank) for member in range(have, self.groups) if (member + rank) % 4],
            complete=self.groups == self.wanted,
        )  # fmt: skip
        return BatchReply(batch=batch, phase="training")


class Own:
    """One rank's stream, without wires."""

    def __init__(self, rank: int, ledger: Ledger) -> None:
        self._rank = rank
        self._ledger = ledger
        self.trouble: Exception | None = None
        self.damaged = False
        self.read_parts = 0

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        if self.trouble is not None:
            raise self.trouble
        return self._ledger.lease(self._rank, attempt, wait, have)

    def read(self, part: Batch) -> Rows:
        self.read_parts += 1
        if self.damaged:
            raise DamagedRows([part.samples[0].row], CorruptData("flipped"))
        return no_rows()

    def check(self) -> None:
        if self.trouble is not None:
            raise self.trouble


def ranked(
    peers: Distributed, ledger: Ledger, *, stop: Callable[[], bool] = lambda: False, lockstep: bool = False
) -> tuple[RankStream, Own]:
    own = Own(peers.rank, ledger)
    return RankStream(own, peers, stop=stop, lockstep=lockstep), own  # type: ignore[arg-type]


def test_every_rank_has_its_own_rows_of_the_same_part() -> None:
    ledger = Ledger(4)

    def work(peers: Distributed) -> Batch:
        reply = ranked(peers, ledger)[0].lease(3, f"attempt of {peers.rank}", 0.5, 0)
        assert reply.batch is not None
        return reply.batch

    batches = as_peers(RANKS, work)
    for rank, batch in enumerate(batches):
        assert [s.id for s in batch.samples] == [f"{m}.{rank}" for m in range(4) if (m + rank) % 4]
    assert {(b.id, b.attempt, b.groups, b.complete) for b in batches} == {("b", "attempt of 0", 4, True)}
    assert sorted(ledger.asked) == [(rank, "attempt of 0", 0.0 if rank else 0.5, 0) for rank in range(RANKS)]


def test_what_a_batch_has_grown_by_meanwhile_is_left_for_the_next_part() -> None:
    ledger = Ledger(2)

    def grow(rank: int) -> None:
        ledger.groups = 2 if rank == 0 and len(ledger.asked) == 1 else 4

    ledger.on_ask = grow

    def work(peers: Distributed) -> list[Batch]:
        stream, _ = ranked(peers, ledger)
        first = stream.lease(3, "a", 0.5, 0).batch
        assert first is not None
        second = stream.lease(3, "a", 0.5, first.groups).batch
        assert second is not None
        return [first, second]

    for rank, (first, second) in enumerate(as_peers(RANKS, work)):
        assert [s.id for s in first.samples] == [f"{m}.{rank}" for m in (0, 1) if (m + rank) % 4]
        assert [s.id for s in second.samples] == [f"{m}.{rank}" for m in (2, 3) if (m + rank) % 4]
        assert (first.groups, first.complete, second.groups, second.complete) == (2, False, 4, True)


def test_no_batch_is_the_same_news_everywhere() -> None:
    ledger = Ledger(0)
    replies = as_peers(RANKS, lambda peers: ranked(peers, ledger)[0].lease(3, "a", 0.5, 0))
    assert {reply.waiting_for for reply in replies} == {"samples"}
    assert [rank for rank, *_ in ledger.asked] == [0]


def test_a_rank_whose_call_failed_makes_all_ask_again() -> None:
    ledger = Ledger(4)

    def work(peers: Distributed) -> tuple[BatchReply, BatchReply]:
        stream, own = ranked(peers, ledger)
        if peers.rank == 2:
            answers = iter([BatchReply(batch=None, phase="training", waiting_for="the service")])
            ask = own.lease
            own.lease = lambda *of: next(answers, None) or ask(*of)  # type: ignore[method-assign]
        return stream.lease(3, "a", 0.5, 0), stream.lease(3, "a", 0.5, 0)

    for first, second in as_peers(RANKS, work):
        assert first.batch is None
        assert "every rank" in first.waiting_for
        assert second.batch is not None


@pytest.mark.parametrize("loser", range(RANKS))
def test_a_lost_lease_is_lost_for_all(loser: int) -> None:
    ledger = Ledger(4)

    def work(peers: Distributed) -> str:
        stream, own = ranked(peers, ledger)
        own.trouble = LeaseLost("another trainer has joined") if peers.rank == loser else None
        with pytest.raises(LeaseLost) as caught:
            stream.lease(3, "a", 0.5, 0)
        own.trouble = None
        assert stream.lease(3, "b", 0.5, 0).batch is not None
        return str(caught.value)

    assert all("another trainer has joined" in said for said in as_peers(RANKS, work))


def test_a_part_is_read_by_all_even_by_those_without_rows() -> None:
    ledger = Ledger(1)

    def work(peers: Distributed) -> int:
        stream, own = ranked(peers, ledger)
        batch = stream.lease(3, "a", 0.5, 0).batch
        assert batch is not None
        assert len(stream.read(batch).length_R) == 0
        return own.read_parts

    assert as_peers(RANKS, work) == [0, 1, 1]


def test_damaged_rows_of_one_rank_end_the_step_of_all() -> None:
    ledger = Ledger(4)

    def work(peers: Distributed) -> type[BaseException]:
        stream, own = ranked(peers, ledger)
        own.damaged = peers.rank == 1
        batch = stream.lease(3, "a", 0.5, 0).batch
        assert batch is not None
        with pytest.raises((DamagedRows, LeaseLost)) as caught:
            stream.read(batch)
        return caught.type

    zero, one, two = as_peers(RANKS, work)
    assert one is DamagedRows
    assert issubclass(zero, LeaseLost)
    assert issubclass(two, LeaseLost)


@pytest.mark.parametrize("trouble", [Stopped, LeaseLost])
def test_without_lockstep_the_others_hear_of_trouble_when_they_next_speak(trouble: Any) -> None:
    """However often each of them has checked meanwhile."""

    def work(peers: Distributed) -> type[BaseException]:
        stopped = threading.Event()
        stream, own = ranked(peers, Ledger(4), stop=stopped.is_set)
        for _ in range(peers.rank * 3):
            stream.check()
        if peers.rank == 0 and trouble is Stopped:
            stopped.set()
        elif peers.rank == 0:
            own.trouble = LeaseLost("gone")
        with pytest.raises((Stopped, LeaseLost)) as caught:
            _ = stream.check() if peers.rank == 0 else peers.total([1.0])  # type: ignore[func-returns-value]
        return caught.type

    assert all(issubclass(raised, trouble) for raised in as_peers(RANKS, work))


def test_in_lockstep_all_agree_at_every_check() -> None:
    def work(peers: Distributed) -> None:
        stream, own = ranked(peers, Ledger(4), lockstep=True)
        stream.check()
        stream.check()
        own.trouble = LeaseLost("gone") if peers.rank == 2 else None
        with pytest.raises(LeaseLost):
            stream.check()

    as_peers(RANKS, work)


@pytest.mark.parametrize("asked", range(RANKS))
def test_one_that_was_asked_to_stop_stops_all_before_the_next_batch(asked: int) -> None:
    def work(peers: Distributed) -> None:
        stream, _ = ranked(peers, Ledger(4), stop=lambda: peers.rank == asked)
        with pytest.raises(Stopped):
            stream.lease(3, "a", 0.5, 0)

    as_peers(RANKS, work)


def test_news_travel_without_samples() -> None:
    """They may be thousands, and each rank gets its own from the service."""
    sizes: list[int] = []

    class Small(Ledger):
        def lease(self, rank: int, attempt: str, wait: float, have: int) -> BatchReply:
            reply = super().lease(rank, attempt, wait, have)
            assert reply.batch is not None
            many = msgspec.structs.replace(reply.batch, samples=[sample(0, rank)] * 5000)
            return msgspec.structs.replace(reply, batch=many)

    def work(peers: Distributed) -> int:
        first = peers.first
        peers.first = lambda message: (sizes.append(len(message)), first(message))[1]  # type: ignore[method-assign]
        batch = ranked(peers, Small(4))[0].lease(3, "a", 0.5, 0).batch
        assert batch is not None
        return len(batch.samples)

    assert as_peers(RANKS, work) == [5000] * RANKS
    assert max(sizes) < 500
