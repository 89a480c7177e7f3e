"""What a trainer asks of the dataflow service.

`Stream` is the blocking view that the loop uses and tests imitate; `RemoteStream` is the real one: an async client in
a thread of its own, every call with a deadline. A batch's lease is not renewed: its deadline is generous, and a
trainer that misses it learns so at the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rillflow.clients.payloads import Arrays
from rillflow.errors import DeadlineExceeded, LeaseLost, Unavailable
from rillflow.trainer.batches import TRAINED_COLUMNS, Rows, make_rows
from rillflow.types import Ack, Batch, BatchReply, CommitBatch, JoinTrainer, LeaseBatch, Row, TrainerJoined
from rillflow.wire import LoopThread

CALL_DEADLINE = 60.0
_LEASE_GRACE = 1.0


class Stream(Protocol):
    """The dataflow service, seen by one trainer of one policy."""

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        """This trainer takes over from version `checkpoint`; `published` is the highest in its weight store."""

    def lease(self, version: int, attempt: str, wait: float) -> BatchReply:
        """The next batch, or none after about `wait` seconds. Asking again with the same attempt is safe."""

    def read(self, batch: Batch) -> Rows:
        """The batch's rows, verified."""

    def commit(self, batch: Batch, version: int, metrics: dict[str, float], step: float, wait: float) -> None:
        """Trained and version move together; LeaseLost when the batch is no longer this trainer's."""


class Dataflow(Protocol):
    """The calls of `clients.dataflow.DataflowClient` that a trainer needs."""

    async def join(self, news: JoinTrainer) -> TrainerJoined: ...

    async def lease_batch(self, ask: LeaseBatch) -> BatchReply: ...

    async def commit(self, news: CommitBatch) -> Ack: ...


class Reader(Protocol):
    """The call of `clients.payloads.PayloadReader` that a trainer needs."""

    async def read(self, rows: Sequence[Row], columns: Sequence[str]) -> list[Arrays]: ...


class RemoteStream:
    """`Stream` over the wire. A fresh `incarnation` for every start of the process."""

    def __init__(
        self, thread: LoopThread, dataflow: Dataflow, reader: Reader, *, policy: str, incarnation: str, groups: int
    ) -> None:
        self._thread = thread
        self._dataflow = dataflow
        self._reader = reader
        self._policy = policy
        self._incarnation = incarnation
        self._groups = groups

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        news = JoinTrainer(
            policy=self._policy, incarnation=self._incarnation, checkpoint=checkpoint, published=published
        )
        return self._thread.run(self._dataflow.join(news), CALL_DEADLINE)

    def lease(self, version: int, attempt: str, wait: float) -> BatchReply:
        ask = LeaseBatch(
            policy=self._policy,
            incarnation=self._incarnation,
            attempt=attempt,
            groups=self._groups,
            version=version,
            wait=wait,
        )
        try:
            return self._thread.run(self._dataflow.lease_batch(ask), wait + _LEASE_GRACE)
        except (Unavailable, DeadlineExceeded, TimeoutError):
            # The service may be restarting. The loop asks again until its own deadline, with the same attempt: had
            # a batch been leased to it, that batch comes again.
            return BatchReply(batch=None, phase="training", waiting_for="the dataflow service to answer")

    def read(self, batch: Batch) -> Rows:
        rows = [sample.row for sample in batch.samples]
        return make_rows(batch.samples, self._thread.run(self._reader.read(rows, TRAINED_COLUMNS), CALL_DEADLINE))

    def commit(self, batch: Batch, version: int, metrics: dict[str, float], step: float, wait: float) -> None:
        news = CommitBatch(
            policy=self._policy,
            incarnation=self._incarnation,
            batch=batch.id,
            attempt=batch.attempt,
            version=version,
            metrics=metrics,
            step_seconds=step,
            wait_seconds=wait,
        )
        try:
            ack = self._thread.run(self._dataflow.commit(news), CALL_DEADLINE)
        except LeaseLost as error:
            raise LeaseLost(error.message, _lost(batch, step)) from error
        if not ack.accepted:
            raise LeaseLost(f"batch {batch.id} was not committed: {ack.reason}", _lost(batch, step))


def _lost(batch: Batch, step: float) -> str:
    """What to do about a lost lease; one that was too short would be lost again and again."""
    if step < batch.seconds:
        return "the trainer restarts by itself"
    return f"the step took {step:.0f} s, the lease {batch.seconds:.0f} s: raise dataflow.batch_lease"
