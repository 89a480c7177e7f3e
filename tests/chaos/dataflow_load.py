"""Load on a real dataflow service and its units, with everything that was acknowledged written down.

Producers play nodes and four consumers play two trainers and two workers of a stage. Everybody speaks to real processes
through the real clients. The acknowledged samples are compared with the trained ones: 0 lost, 0 twice.
"""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.traffic import COLUMNS, Columns, Processes, Producers, Seat, consume_stage, last_lines, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.dataflow.audit import audit
from rillflow.errors import LeaseLost, RillflowError
from rillflow.runtime.folder import RunFolder
from rillflow.types import Ack, Batch, BatchSample, TaskLease, Units

POLICIES = ("solver", "checker")
GROUP, BATCH = 4, 4
NODES = 8
_BEFORE = 100  # tasks that are trained while the harm is being done


def token_of(task: str, policy: str) -> int:
    """Return the content of the rows of this task and policy, so that a mix-up is noticed."""
    return zlib.crc32(f"{task}/{policy}".encode()) % 30_000 + 1


def rows_of(lease: TaskLease) -> Mapping[str, Columns]:
    length = 20 + zlib.crc32(lease.attempt.encode()) % 200
    return {policy: trajectory(length, token_of(lease.task.id, policy)) for policy in POLICIES}


def check_rows(samples: Sequence[BatchSample], arrays: Sequence[Mapping[str, Any]]) -> None:
    for sample, row in zip(samples, arrays, strict=True):
        assert len(row["tokens"]) == sample.tokens
        assert (row["tokens"] == token_of(sample.task, sample.policy)).all()


class Trainer(Seat):
    """Leases batches of one policy, whole or streamed, reads them and commits; it is never restarted.

    After `_BEFORE` tasks it waits for `harmed`: the load must not end before the harm is done.
    """

    def __init__(
        self, policy: str, client: DataflowClient, reader: PayloadReader, least: int, harmed: asyncio.Event
    ) -> None:
        super().__init__(policy, client)
        self._harmed = harmed
        self.trained: Counter[tuple[str, str]] = Counter()  # (task, policy) of committed samples
        self._reader = reader
        self._least = least

    async def run(self) -> None:
        await self.join()
        going = True
        while going:
            if len(self.trained) >= _BEFORE:
                await self._harmed.wait()
            try:
                going = await self._step()
            except LeaseLost:
                continue  # the batch went back to the stream: the next one is leased under another attempt

    async def _step(self) -> bool:
        attempt, samples = uuid.uuid4().hex, list[BatchSample]()
        batch: Batch | None = None
        while batch is None or not batch.complete:
            have = 0 if batch is None else batch.groups
            reply = await self.lease(BATCH, wait=1.0, attempt=attempt, have=have, least=self._least)
            if reply.batch is None:
                if reply.phase != "training":
                    return False
                continue
            batch = reply.batch
            check_rows(batch.samples, await self._reader.read([s.row for s in batch.samples], list(COLUMNS)))
            samples += batch.samples
        await self.commit(batch, deadline=60.0)
        self.trained.update((sample.task, sample.policy) for sample in samples)
        return True


def make_loaded_run(parent: Path, prompts: int) -> RunFolder:
    policies = {
        "solver": {"stages": {"reference": {"kind": "reference"}}, "trainer": {"batch_groups": BATCH, "steps": 10_000}},
        "checker": {"trainer": {"batch_groups": BATCH, "steps": 10_000}},
    }
    flow = {"group_size": GROUP, "staleness": 1000, "units": {"count": 2}, "task_lease": 10.0, "batch_lease": 20.0}
    return make_run(parent, prompts, policies, flow)


@dataclass
class Load:
    """`client` and `units` reach the service and its units; with `near`, some writers use the units' folders."""

    processes: Processes
    client: DataflowClient
    units: Callable[[], Awaitable[Units]]
    near: bool = True
    acked: set[str] = field(default_factory=set)
    harmed: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(self, harm: Coroutine[Any, Any, None], seconds: float) -> dict[str, Trainer]:
        """Until all is trained; `harm` is done meanwhile, and sets `harmed` once it has done enough."""
        async with AsyncExitStack() as stack:
            near = self._reader(stack, remote=not self.near)
            trainers = {
                "solver": Trainer("solver", self.client, near, 0, self.harmed),
                "checker": Trainer("checker", self.client, self._reader(stack, remote=True), 1, self.harmed),
            }
            stage = ("solver", "reference")
            readers = [self._reader(stack, remote=n == 0 or not self.near) for n in range(2)]
            background = [asyncio.create_task(_handle(self.client, reader, stage)) for reader in readers]
            background += [asyncio.create_task(_until_over(self._producer(stack, n))) for n in range(NODES)]
            background.append(asyncio.create_task(harm))
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*(trainer.run() for trainer in trainers.values()))
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
        return trainers

    def check(self, trainers: Mapping[str, Trainer], prompts: int) -> None:
        """After the end of the processes."""
        folder = self.processes.folder
        report = audit(folder.ledger)
        assert report.balanced, (report.to_dict(), last_lines(folder, "dataflow"))
        for policy, trainer in trainers.items():
            assert set(trainer.trained.values()) == {1}, "a sample was trained twice"
            assert {task for task, _ in trainer.trained} >= self.acked, "an acknowledged sample was lost"
            assert len(trainer.trained) == prompts * GROUP, policy

    def _reader(self, stack: AsyncExitStack, *, remote: bool) -> PayloadReader:
        made = PayloadReader(self.units, self.processes.folder.token, allow_map=not remote)
        stack.push_async_callback(made.close)
        return made

    def _producer(self, stack: AsyncExitStack, number: int) -> Producers:
        near = self.near and number % 2 == 0
        writer = UnitWriter(self.units, self.processes.folder.token, allow_local=near)
        stack.push_async_callback(writer.close)
        return Producers(f"node-{number}", self.client, writer, POLICIES, rows_of, self._note, deadline=90.0)

    def _note(self, lease: TaskLease, ack: Ack) -> None:
        if ack.accepted:
            self.acked.add(lease.task.id)


async def _handle(client: DataflowClient, reader: PayloadReader, stage: tuple[str, str]) -> None:
    """Run a worker of the stage until it is cancelled."""

    def seen(samples: Sequence[BatchSample], arrays: Sequence[Mapping[str, Any]]) -> bool:
        check_rows(samples, arrays)
        return True

    while True:
        try:
            await consume_stage(client, reader, stage, 2, seen)
        except RillflowError:
            await asyncio.sleep(0.1)  # its lease was lost, or a unit was down for too long: it goes on


async def _until_over(producer: Producers) -> None:
    while True:
        try:
            await producer.run(2)
            return
        except RillflowError:
            await asyncio.sleep(0.1)
