"""The trainer's stream over HTTP: an async client in its own thread, every call with a deadline.

While a batch is held, that thread renews its lease, so a step may take longer than a lease. A trainer that hangs must
lose its batch in the end: after `MOST_LEASES` times the lease without a call of `check`, which the loop makes with
every micro-batch, the lease is no longer renewed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rillflow.clients.payloads import READ_DEADLINE, Arrays, DamagedRows
from rillflow.errors import DeadlineExceeded, LeaseLost, RillflowError, Unavailable
from rillflow.trainer.batches import TRAINED_COLUMNS, Part, make_rows, payload_name, with_experts, with_staged
from rillflow.trainer.stream import StepRecord
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    CommitBatch,
    JoinTrainer,
    LeaseBatch,
    LoseRows,
    RenewBatch,
    Row,
    TrainerJoined,
)
from rillflow.wire import LoopThread

log = logging.getLogger(__name__)

CALL_DEADLINE = 60.0
RENEWALS_A_LEASE = 4
MOST_LEASES = 10
_GRACE = 1.0  # seconds beyond a call's own deadline
_LONGEST_GRACE = 16.0  # if the service needs longer to put a batch together
_RESTARTS = "the trainer restarts from its last checkpoint"


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
    """`stream.Stream` over HTTP.

    Every start of the trainer has a new `incarnation`. `least` is that of `LeaseBatch`, `weights_url` that of
    `JoinTrainer`. `staged` are the columns that stages added. One `rank` of several leases and reads its own part of
    each batch; with context parallel these are teams, whose ranks all read the part. Only the first of all ranks joins,
    commits and (`renews`) renews.
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
        renews: bool = True,
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
        self._renews = renews
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
            # The service may be restarting. The loop asks again until its own deadline under the same attempt, which
            # gets the same batch if one was leased. Or the batch is large, and needs a longer deadline.
            self._grace = min(2.0 * self._grace, _LONGEST_GRACE)
            return BatchReply(batch=None, phase="training", waiting_for="the dataflow service to answer")
        if reply.batch is not None:
            self._grace = min(max(_GRACE, 2.0 * (time.monotonic() - asked - wait)), _LONGEST_GRACE)
        if reply.batch is not None and self._renews:
            self._thread.run(self._renew(reply.batch), CALL_DEADLINE)
        return reply

    def check(self) -> None:
        if self._renewal is None:
            return
        if self._renewal.lost is not None:
            raise self._renewal.lost
        self._renewal.heard()

    def abandon(self) -> None:
        self._thread.run(self._stop_renewing(), CALL_DEADLINE)

    async def _renew(self, batch: Batch) -> None:
        """Start a new renewal: an answered lease shows that the loop lives."""
        await self._stop_renewing()
        self._renewal = Renewal(self._dataflow.renew_batch, batch)
        self._renewing = asyncio.create_task(self._renewal.run(), name=f"renew-{batch.id}")

    async def _stop_renewing(self) -> None:
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
            if not self._staged and "experts" not in self._columns:
                return rows
            data = with_staged(rows, part.samples, columns, self._staged)
            return with_experts(data, part.samples, columns) if "experts" in self._columns else data
        except DamagedRows as error:
            news = LoseRows(rows=list(error.rows), reason=error.message)
            self._thread.run(self._dataflow.lose_rows(news), CALL_DEADLINE)
            raise

    def commit(self, record: StepRecord) -> None:
        news = CommitBatch(
            policy=self._policy,
            incarnation=self._incarnation,
            batch=record.batch.id,
            attempt=record.batch.attempt,
            version=record.version,
            metrics=record.metrics,
            step_seconds=record.step_seconds,
            wait_seconds=record.wait_seconds,
            restorable=record.restorable,
            kept=list(record.kept),
        )
        self.abandon()  # a committed batch must not be renewed
        try:
            ack = self._thread.run(self._dataflow.commit(news), CALL_DEADLINE)
        except LeaseLost as error:
            raise LeaseLost(error.message, _RESTARTS) from error
        if not ack.accepted:
            raise LeaseLost(f"batch {record.batch.id} was not committed: {ack.reason}", _RESTARTS)


class Renewal:
    """Renews the lease of one batch until `run` is cancelled. `lost` says why the batch is no longer held.

    The loop's thread reads `lost` and calls `heard`: each is one assignment by one side.
    """

    def __init__(self, renew: Callable[[RenewBatch], Awaitable[Ack]], batch: Batch) -> None:
        self.lost: LeaseLost | None = None
        self._renew = renew
        self._news = RenewBatch(batch=batch.id, attempt=batch.attempt)
        self._seconds = batch.seconds
        self._silent = 0

    def heard(self) -> None:
        """Note that the loop lives."""
        self._silent = 0

    async def run(self) -> None:
        while self.lost is None:
            await asyncio.sleep(self._seconds / RENEWALS_A_LEASE)
            self._silent += 1
            if self._silent <= RENEWALS_A_LEASE * MOST_LEASES:
                await self._renew_once()
            elif self._silent == RENEWALS_A_LEASE * MOST_LEASES + 1:
                log.error(
                    "batch %s has been held for %.0f s, %d times its lease, without a sign of the trainer's loop: "
                    "its lease is no longer renewed and it returns to the stream",
                    self._news.batch,
                    self._seconds * MOST_LEASES,
                    MOST_LEASES,
                )

    async def _renew_once(self) -> None:
        try:
            ack = await self._renew(self._news)
            if not ack.accepted:
                raise LeaseLost(f"batch {self._news.batch} is no longer held: {ack.reason}")
        except LeaseLost as error:
            log.warning("batch %s is lost: %s", self._news.batch, error.message)
            self.lost = error
        except RillflowError as error:
            # The service may be restarting, which gives every live lease its full time again.
            log.warning("the lease of batch %s was not renewed: %s", self._news.batch, error)
