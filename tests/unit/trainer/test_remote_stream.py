"""The trainer's side of the wire: what it does when an answer is slow to come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rillflow.trainer import stream as streams
from rillflow.trainer.stream import RemoteStream
from rillflow.types import Ack, Batch, BatchReply, LeaseBatch
from rillflow.wire import LoopThread


class Slow:
    """A service that needs `seconds` to put a batch together, whoever asks and however often."""

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
    monkeypatch.setattr(streams, "_GRACE", 0.05)
    service = Slow(0.3)
    stream = stream_to(service, thread)
    assert asks_until_answered(stream, service) > 1
    service.seconds = 0.1  # more than it waits at first, much less than it has seen
    assert asks_until_answered(stream, service) == 1, "it knows by now how long that takes"
