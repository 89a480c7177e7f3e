"""Calls made at the same time travel together; each is answered on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rillflow.batching import MOST
from rillflow.clients.dataflow import UNDER_WAY, Coalesced
from rillflow.errors import BadRequest, DeadlineExceeded, RillflowError, Unavailable, WireError


class Peer:
    """Answers with the square of each number; refuses negative ones, and everything while it is down."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.deadlines: list[float] = []
        self.open = asyncio.Event()
        self.open.set()
        self.down = False

    async def __call__(self, items: Sequence[int], deadline: float) -> list[int | RillflowError]:
        self.calls.append(list(items))
        self.deadlines.append(deadline)
        await self.open.wait()
        if self.down:
            raise Unavailable("it is down", "start it")
        return [BadRequest(f"{n} is negative", "give another") if n < 0 else n * n for n in items]


async def turns() -> None:
    """Let the tasks that were made run until they wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_comes_while_a_call_is_under_way_travels_with_the_next() -> None:
    peer = Peer()
    peer.open.clear()
    calls = Coalesced(peer)
    first = []
    for n in range(1, UNDER_WAY + 1):
        first.append(asyncio.create_task(calls(n, 5.0)))
        await turns()
    others = [asyncio.create_task(calls(n, 5.0)) for n in range(3, 7)]
    await turns()
    peer.open.set()
    assert await asyncio.gather(*first, *others) == [1, 4, 9, 16, 25, 36]
    assert peer.calls == [[1], [2], [3, 4, 5, 6]]


async def test_one_refusal_is_nobody_elses() -> None:
    calls = Coalesced(Peer())
    good, bad, other = await asyncio.gather(calls(2, 5.0), calls(-1, 5.0), calls(3, 5.0), return_exceptions=True)
    assert (good, other) == (4, 9)
    assert isinstance(bad, BadRequest)


async def test_a_call_that_fails_as_a_whole_fails_for_everybody_with_errors_of_their_own() -> None:
    peer = Peer()
    peer.down = True
    calls = Coalesced(peer)
    errors = await asyncio.gather(calls(1, 5.0), calls(2, 5.0), return_exceptions=True)
    assert [type(error) for error in errors] == [Unavailable, Unavailable]
    assert errors[0] is not errors[1]
    peer.down = False
    assert await calls(3, 5.0) == 9


async def test_a_group_has_a_bound_and_the_longest_deadline() -> None:
    peer = Peer()
    calls = Coalesced(peer)
    answers = await asyncio.gather(*(calls(n, 1.0 + n) for n in range(MOST + 10)))
    assert answers == [n * n for n in range(MOST + 10)]
    assert max(map(len, peer.calls)) == MOST
    assert peer.deadlines[0] == pytest.approx(MOST, abs=1.0)


async def test_who_stopped_waiting_is_not_sent_and_close_gives_up_the_rest() -> None:
    peer = Peer()
    peer.open.clear()
    calls = Coalesced(peer)
    under_way = []
    for n in range(1, UNDER_WAY + 1):
        under_way.append(asyncio.create_task(calls(n, 5.0)))
        await turns()
    gone, waiting = (asyncio.create_task(calls(n, 5.0)) for n in (7, 8))
    await turns()
    gone.cancel()
    await turns()
    await calls.close()
    for task in (*under_way, waiting):
        with pytest.raises(Unavailable, match="closed"):  # no cancellation: these tasks were not cancelled
            await task
    assert peer.calls == [[1], [2]]
    with pytest.raises(Unavailable, match="closed"):
        await calls(9, 5.0)


async def test_nobody_waits_longer_than_they_said() -> None:
    peer = Peer()
    peer.open.clear()
    calls = Coalesced(peer)
    patient = []
    for n in range(1, UNDER_WAY + 1):
        patient.append(asyncio.create_task(calls(n, 60.0)))
        await turns()
    with pytest.raises(DeadlineExceeded):
        await calls(7, 0.05)
    peer.open.set()
    assert await asyncio.gather(*patient) == [1, 4]
    assert await calls(8, 5.0) == 64
    assert [7] not in peer.calls


async def test_a_bug_in_a_call_is_an_error_for_its_own_and_stops_nobody_else() -> None:
    peer = Peer()
    peer.open.clear()

    async def buggy(items: Sequence[int], deadline: float) -> list[int | RillflowError]:
        await peer.open.wait()
        if 1 in items:
            raise TypeError("cannot encode")
        return await peer(items, deadline)

    calls = Coalesced(buggy)
    tasks = []
    for n in range(1, UNDER_WAY + 2):
        tasks.append(asyncio.create_task(calls(n, 5.0)))
        await turns()
    peer.open.set()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, WireError)
    assert "TypeError: cannot encode" in str(first)
    assert others == [n * n for n in range(2, UNDER_WAY + 2)]


async def test_too_few_answers_are_an_error() -> None:
    async def short(items: Sequence[int], deadline: float) -> list[int | RillflowError]:
        return []

    with pytest.raises(RillflowError, match="0 answers to 1 calls"):
        await Coalesced(short)(1, 5.0)


async def test_who_comes_when_both_senders_have_just_ended_is_sent() -> None:
    gates: list[asyncio.Future[None]] = []

    async def call(items: Sequence[int], deadline: float) -> list[int]:
        gates.append(asyncio.get_running_loop().create_future())
        await gates[-1]
        return list(items)

    coalesced = Coalesced[int, int](call)
    first = []
    for number in range(2):  # one after the other, or they would travel together
        first.append(asyncio.create_task(coalesced(number, 20.0)))
        await turns()
    assert len(gates) == 2

    async def right_after() -> int:
        await gates[1]  # goes on in the same turn of the loop as the second sender, after it
        return await coalesced(2, 20.0)

    late = asyncio.create_task(right_after())
    await asyncio.sleep(0)
    for gate in gates[:2]:
        gate.set_result(None)
    assert await asyncio.gather(*first) == [0, 1]
    await turns()
    gates[2].set_result(None)
    assert await late == 2
