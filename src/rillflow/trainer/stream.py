"""What a trainer asks of the dataflow service.

`Stream` is the blocking view that the loop uses and tests imitate; `RemoteStream` is the real one: an async client in
a thread of its own, every call with a deadline. While a batch is in hand that thread renews its lease, so that a step
may take longer than a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from rillflow.clients.payloads import READ_DEADLINE, Arrays, DamagedRows
from rillflow.errors import DeadlineExceeded, LeaseLost, Unavailable
from rillflow.trainer.batches import TRAINED_COLUMNS, make_rows
from rillflow.trainer.graph.databuffer import Part
from rillflow.trainer.renewal import Renewal
from rillflow.trainer.staged import payload_name, with_staged
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    CommitBatch,
    JoinTrainer,
    KeptTokens,
    LeaseBatch,
    LoseRows,
    RenewBatch,
    Row,
    TrainerJoined,
)
from rillflow.wire import LoopThread

CALL_DEADLINE = 60.0
_GRACE = 1.0  # for a call that has a deadline of its own
_LONGEST_GRACE = 16.0  # where the service needs longer to put a batch together


class Stream(Protocol):
    """The dataflow service, seen by one trainer of one policy. It holds at most one batch at a time."""

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        """This trainer takes over from version `checkpoint`; `published` is the highest in its weight store."""

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        """What follows after the first `have` groups of the attempt's batch, or none after about `wait` seconds.

        Asking again is safe. A new attempt gives an earlier batch up. LeaseLost when the batch, or for `have` 0 the
        right to ask for one, is no longer this trainer's.
        """

    def read(self, part: Batch) -> Part:
        """The rows of a part, verified. Rows that are damaged have been reported when this raises DamagedRows."""

    def check(self) -> None:
        """Tell that the step goes on; LeaseLost when the batch in hand is known to be lost."""

    def abandon(self) -> None:
        """The batch in hand is not worked on any more."""

    def commit(
        self,
        batch: Batch,
        version: int,
        metrics: dict[str, float],
        *,
        step: float,
        wait: float,
        restorable: int,
        kept: Sequence[KeptTokens] = (),
    ) -> None:
        """Trained and version move together; LeaseLost when the batch is no longer this trainer's."""


class Dataflow(Protocol):
    """The calls of `clients.dataflow.DataflowClient` that a trainer needs."""

    async def join(self, news: JoinTrainer) -> TrainerJoined: ...

    async def lease_batch(self, ask: LeaseBatch) -> BatchReply: ...

    async def renew_batch(self, news: RenewBatch) -> Ack: ...

    async def lose_rows(self, news: LoseRows) -> Ack: ...

    async def commit(self, news: CommitBatch) -> Ack: ...


class Reader(Protocol):
    """The call of `clients.payloads.PayloadReader` that a trainer needs."""

    async def read_samples(self, samples: Sequence[Sequence[Row]], columns: Sequence[str]) -> list[Arrays]: ...


class RemoteStream:
    """`Stream` over the wire. A fresh `incarnation` for every start of the trainer; `least` as in `LeaseBatch`,
    `weights_url` as in `JoinTrainer`. `staged` are the columns that stages have added.

    One `rank` of several leases and reads its own part of each batch; only rank 0 renews, joins and commits.
    """

    def __init__(
        self,
        thread: LoopThread,
        dataflow: Dataflow,
        reader: Reader,
        *,
        policy: str,
        incarnation: str,
        groups: int,
        least: int = 0,
        columns: Sequence[str] = TRAINED_COLUMNS,
        staged: Sequence[str] = (),
        weights_url: str = "",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._thread = thread
        self._dataflow = dataflow
        self._reader = reader
        self._policy = policy
        self._incarnation = incarnation
        self._groups = groups
        self._least = least
        self._columns = (*columns, *map(payload_name, staged))
        self._staged = staged
        self._weights_url = weights_url
        self._rank = rank
        self._ranks = ranks
        self._grace = _GRACE
        self._renewal: Renewal | None = None
        self._renewing: asyncio.Task[None] | None = None

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        news = JoinTrainer(
            policy=self._policy,
            incarnation=self._incarnation,
            checkpoint=checkpoint,
            published=published,
            weights=self._weights_url,
        )
        return self._thread.run(self._dataflow.join(news), CALL_DEADLINE)

    # ------------------------------------------------------------ leasing

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        ask = LeaseBatch(
            policy=self._policy,
            incarnation=self._incarnation,
            attempt=attempt,
            groups=self._groups,
            version=version,
            wait=wait,
            have=have,
            least=self._least,
            rank=self._rank,
            ranks=self._ranks,
        )
        asked = time.monotonic()
        try:
            reply = self._thread.run(self._dataflow.lease_batch(ask), wait + self._grace)
        except (Unavailable, DeadlineExceeded, TimeoutError):
            # The service may be restarting. The loop asks again until its own deadline, with the same attempt: had
            # a batch been leased to it, that batch comes again. Or the batch is large: as short a wait would miss it
            # every time.
            self._grace = min(2.0 * self._grace, _LONGEST_GRACE)
            return BatchReply(batch=None, phase="training", waiting_for="the dataflow service to answer")
        if reply.batch is not None:
            self._grace = min(max(_GRACE, 2.0 * (time.monotonic() - asked - wait)), _LONGEST_GRACE)
        if reply.batch is not None and self._rank == 0:
            self._thread.run(self._renew(reply.batch), CALL_DEADLINE)
        return reply

    def check(self) -> None:
        if self._renewal is None:
            return
        if self._renewal.lost is not None:
            raise self._renewal.lost
        self._renewal.heard()

    def abandon(self) -> None:
        self._thread.run(self._let_go(), CALL_DEADLINE)

    async def _renew(self, batch: Batch) -> None:
        """Begin anew: an answer is a sign that the loop lives."""
        await self._let_go()
        self._renewal = Renewal(self._dataflow.renew_batch, batch)
        self._renewing = asyncio.create_task(self._renewal.run(), name=f"renew-{batch.id}")

    async def _let_go(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        self._renewal = self._renewing = None

    # ------------------------------------------------------------ reading and committing

    def read(self, part: Batch) -> Part:
        wanted = [[sample.row, *sample.extra] for sample in part.samples]
        try:
            columns = self._thread.run(self._reader.read_samples(wanted, self._columns), READ_DEADLINE + _GRACE)
            rows = make_rows(part.samples, columns, part.policy, part.version, frozenset(part.keep))
            return with_staged(rows, part.samples, columns, self._staged) if self._staged else rows
        except DamagedRows as error:
            news = LoseRows(rows=list(error.rows), reason=error.message)
            self._thread.run(self._dataflow.lose_rows(news), CALL_DEADLINE)
            raise

    def commit(
        self,
        batch: Batch,
        version: int,
        metrics: dict[str, float],
        *,
        step: float,
        wait: float,
        restorable: int,
        kept: Sequence[KeptTokens] = (),
    ) -> None:
        news = CommitBatch(
            policy=self._policy,
            incarnation=self._incarnation,
            batch=batch.id,
            attempt=batch.attempt,
            version=version,
            metrics=metrics,
            step_seconds=step,
            wait_seconds=wait,
            restorable=restorable,
            kept=list(kept),
        )
        self.abandon()  # not to be renewed after it was committed
        try:
            ack = self._thread.run(self._dataflow.commit(news), CALL_DEADLINE)
        except LeaseLost as error:
            raise LeaseLost(error.message, _RESTARTS) from error
        if not ack.accepted:
            raise LeaseLost(f"batch {batch.id} was not committed: {ack.reason}", _RESTARTS)


_RESTARTS = "the trainer restarts by itself, from its last checkpoint"
