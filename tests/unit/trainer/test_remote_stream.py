"""The trainer's stream over HTTP: slow answers, and leases that are renewed until their holder is lost or hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rillflow.errors import LeaseLost, RillflowError, Unavailable
from rillflow.trainer import remote_stream
from rillflow.trainer.remote_stream import MOST_LEASES, RENEWALS_A_LEASE, RemoteStream, Renewal
from rillflow.types import Ack, Batch, BatchReply, LeaseBatch, RenewBatch
from rillflow.wire import LoopThread


class Slow:
    """A service that needs `seconds` to put a batch together, however often it is asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked = 0

    async def lease_batch(self, ask: LeaseBatch) -> BatchReply:
        self.asked += 1
        await asyncio.sleep(self.seconds)
        batch = Batch(id="b", attempt=ask.attempt, policy="p", version=0, samples=[], seconds=60, groups=1)
        return BatchReply(batch=batch, phase="training")

    async def renew_batch(self, news: Any) -> Ack:
        return Ack(accepted=True)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("wire")
    yield thread
    thread.close()


def stream_to(service: Slow, thread: LoopThread) -> RemoteStream:
    reader: Any = None
    return RemoteStream(thread, service, reader, policy="p", incarnation="i", groups=1)  # type: ignore[arg-type]


def asks_until_answered(stream: RemoteStream, service: Slow) -> int:
    before = service.asked
    while stream.lease(0, "a", 0.0, 0).batch is None:
        assert service.asked - before < 20, "the answer never comes"
    stream.abandon()
    return service.asked - before


def test_a_batch_that_takes_long_to_answer_is_waited_for(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one, which many ranks ask for at once. To ask again and again as briefly would never get it."""
    monkeypatch.setattr(remote_stream, "_GRACE", 0.05)
    service = Slow(0.3)
    stream = stream_to(service, thread)
    assert asks_until_answered(stream, service) > 1
    service.seconds = 0.1  # more than it waits at first, much less than it has seen
    assert asks_until_answered(stream, service) == 1, "it knows by now how long that takes"


BATCH = Batch(id="b", attempt="a", policy="p", version=0, samples=[], seconds=0.004)


RENEWALS = RENEWALS_A_LEASE * MOST_LEASES


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it sends no event
            await asyncio.sleep(BATCH.seconds)


class Service:
    """Gives scripted answers, then accepts."""

    def __init__(self, *answers: Ack | RillflowError) -> None:
        self._answers = iter(answers)
        self.asked: list[RenewBatch] = []

    async def renew(self, news: RenewBatch) -> Ack:
        self.asked.append(news)
        answer = next(self._answers, Ack(accepted=True))
        if isinstance(answer, RillflowError):
            raise answer
        return answer


async def test_a_holder_that_hangs_loses_its_batch_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    renewal = Renewal(service.renew, BATCH)
    with caplog.at_level(logging.ERROR):
        running = asyncio.create_task(renewal.run())
        await until(lambda: "times its lease" in caplog.text)
        await asyncio.sleep(5 * BATCH.seconds)  # it asks no more, and says so once
    assert not running.done()
    running.cancel()
    assert len(service.asked) == RENEWALS
    assert renewal.lost is None
    assert caplog.text.count("10 times its lease") == 1


async def test_a_long_step_that_goes_on_keeps_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Each micro-batch is a sign of life, however many leases the whole step takes."""
    most = 3 * RENEWALS
    service = Service(*[Ack(accepted=True)] * most, LeaseLost("gone at last"))
    renewal = Renewal(service.renew, BATCH)
    running = asyncio.create_task(renewal.run())
    while not running.done():
        renewal.heard()
        await asyncio.sleep(BATCH.seconds)
    await running
    assert len(service.asked) == most + 1
    assert "times its lease" not in caplog.text


async def test_who_comes_back_after_a_long_silence_learns_that_the_batch_is_gone() -> None:
    service = Service(*[Ack(accepted=True)] * RENEWALS, LeaseLost("batch b is released"))
    renewal = Renewal(service.renew, BATCH)
    running = asyncio.create_task(renewal.run())
    await until(lambda: len(service.asked) == RENEWALS)
    assert renewal.lost is None
    renewal.heard()
    await asyncio.wait_for(running, 60)
    assert renewal.lost is not None


@pytest.mark.parametrize("answer", [LeaseLost("batch b is released"), Ack(accepted=False, reason="released")])
async def test_a_batch_that_is_lost_is_known_to_be(answer: Ack | RillflowError) -> None:
    service = Service(Ack(accepted=True), answer)
    renewal = Renewal(service.renew, BATCH)
    await renewal.run()
    assert len(service.asked) == 2
    assert renewal.lost is not None
    assert "released" in renewal.lost.message


async def test_a_service_that_is_away_is_asked_again() -> None:
    service = Service(Unavailable("restarting"), Unavailable("restarting"), LeaseLost("gone"))
    renewal = Renewal(service.renew, BATCH)
    await renewal.run()
    assert len(service.asked) == 3
