"""A worker of one stage: lease groups, read their samples, make columns, write them, commit; until the run has ended.

Invariants: columns are durable in a storage unit before they are committed. A lease is renewed while the stage computes
and expires when the worker dies, so a kill costs the work on one lease. Columns of groups that another worker has taken
over are dropped. Everything is idempotent under the attempt id of its lease.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np

from rillflow.clients.ledgers import connect
from rillflow.clients.payloads import Arrays, DamagedRows, PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.config import Recipe
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DeadlineExceeded, LeaseLost, RunError, StorageError, Unavailable
from rillflow.stages.stage import Stage, build_stage
from rillflow.storage import startup
from rillflow.storage.spans import NoSpans, Spans
from rillflow.trainer.batches import Databuffer, columns_of, make_rows, payload_name
from rillflow.trainer.remote_stream import Renewal
from rillflow.types import Batch, CommitStage, LeaseStage, LoseRows, Row, SampleColumns

log = logging.getLogger(__name__)

WAIT = 20.0  # seconds that one call waits for groups
_PAUSE = 0.5
_MAY_PASS = (Unavailable, DeadlineExceeded, StorageError)


class StageWorker:
    """A worker of one stage. It gives up after `patience` seconds without an answer of the run's service, because a
    worker that joined by URL has no supervisor. It writes its timeline to `spans`."""

    def __init__(
        self,
        recipe: Recipe,
        policy: str,
        name: str,
        stage: Stage,
        *,
        dataflow_url: str,
        token: str,
        patience: float | None = None,
        clock: Clock | None = None,
        spans: Spans | None = None,
    ) -> None:
        settings = recipe.policies[policy]
        self._policy = policy
        self._name = name
        self._stage = stage
        self._groups = settings.stages[name].groups
        self._columns = columns_of(settings.trainer)
        self._patience = patience
        self._clock = clock or SystemClock()
        self._heard = self._clock.monotonic()
        self._spans = spans or NoSpans()
        self._dataflow = connect(dataflow_url, token)
        self._reader = PayloadReader(self._dataflow.units, token)
        self._writer = UnitWriter(self._dataflow.units, token, segment_bytes=recipe.dataflow.units.segment_bytes)
        self._thread = ThreadPoolExecutor(1, f"stage-{name}")  # torch keeps what it has set up by thread

    async def run(self) -> None:
        """Handle groups until the run has ended."""
        attempt = uuid.uuid4().hex
        while True:
            try:
                reply = await self._dataflow.lease_stage(self._ask(attempt))
                self._heard = self._clock.monotonic()
                if reply.phase == "ended":
                    return
                if reply.batch is None and reply.phase != "training":
                    await asyncio.sleep(_PAUSE)  # a trainer that restarts may still roll back
                if reply.batch is not None and await self._handle(reply.batch):
                    attempt = uuid.uuid4().hex
            except LeaseLost as error:
                log.warning("stage %s: %s", self._name, error.message)
                attempt = uuid.uuid4().hex
            except _MAY_PASS as error:
                self._check_patience(error)
                await asyncio.sleep(_PAUSE)  # then again under the same attempt, which keeps its groups

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._reader.close()
        await self._writer.close()
        await self._dataflow.close()

    def _ask(self, attempt: str) -> LeaseStage:
        return LeaseStage(policy=self._policy, stage=self._name, attempt=attempt, groups=self._groups, wait=WAIT)

    def _check_patience(self, error: Exception) -> None:
        log.warning("stage %s: %s", self._name, error)
        if self._patience is not None and self._clock.monotonic() - self._heard > self._patience:
            raise RunError(
                f"the run's service has not answered for {self._patience:.0f} s", "is the run over, or its host gone?"
            ) from error

    # ------------------------------------------------------------ one lease

    async def _handle(self, batch: Batch) -> bool:
        """Return whether the lease is finished. Unreadable rows are reported, and their episodes played again; the
        attempt then holds the remaining groups."""
        try:
            async with self._renewed(batch):
                columns = await self._made(batch) if batch.samples else []
        except DamagedRows as error:
            await self._dataflow.lose_rows(LoseRows(rows=list(error.rows), reason=error.message))
            return False
        news = CommitStage(
            policy=self._policy, stage=self._name, batch=batch.id, attempt=batch.attempt, columns=columns
        )
        ack = await self._dataflow.commit_stage(news)
        if not ack.accepted:
            log.warning("stage %s: batch %s was not taken: %s", self._name, batch.id, ack.reason)
        return True

    async def _made(self, batch: Batch) -> list[SampleColumns]:
        payload = await self._reader.read_samples([[sample.row] for sample in batch.samples], self._columns)
        data = Databuffer(make_rows(batch.samples, payload, batch.policy, batch.version))
        rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, data)
        places: Sequence[Row] = await self._writer.put(rows)
        return [SampleColumns(sample=sample.id, row=row) for sample, row in zip(batch.samples, places, strict=True)]

    def _compute(self, data: Databuffer) -> list[Arrays]:
        """Return the columns of each sample, as a storage unit takes them."""
        with self._spans.doing("infer"):
            made = self._stage.columns(data)
        rows: list[Arrays] = [{} for _ in range(len(data))]
        for name, column in made.items():
            parts = np.split(column, data.rows.start_R[1:] if name.endswith("_N") else range(1, len(data)))
            for row, part in zip(rows, parts, strict=True):
                row[payload_name(name)] = part
        return rows

    @asynccontextmanager
    async def _renewed(self, batch: Batch) -> AsyncIterator[None]:
        renewing = asyncio.create_task(Renewal(self._dataflow.renew_batch, batch).run(), name=f"renew-{batch.id}")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})


async def run_stage(
    recipe: Recipe,
    policy: str,
    name: str,
    *,
    dataflow_url: str,
    token: str,
    patience: float | None = None,
    spans: Spans | None = None,
) -> None:
    """Work for the stage `name` of `policy` until the run has ended. `token` is the stage's, `spans` its timeline."""
    startup.doing("loading the model")
    stage = await asyncio.to_thread(build_stage, recipe, policy, name)
    worker = StageWorker(
        recipe, policy, name, stage, dataflow_url=dataflow_url, token=token, patience=patience, spans=spans
    )
    startup.ready()
    log.info("works for stage %s of %s", name, policy)
    try:
        await worker.run()
    finally:
        await worker.close()
