"""The dataflow service and its storage units are killed with -9 again and again under load: 0 lost, 0 twice.

Eight producers play nodes and four consumers play two trainers and two workers of a stage. Everybody speaks to real
processes through the real clients, half of them over HTTP alone. What was acknowledged is remembered here and compared
with what was trained.
"""

from __future__ import annotations

import asyncio
import random
import uuid
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.traffic import COLUMNS, Columns, Processes, Producers, Seat, consume_stage, last_lines, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.dataflow.audit import audit
from rillflow.errors import LeaseLost, RillflowError
from rillflow.types import Ack, Batch, BatchSample, TaskLease

POLICIES = ("solver", "checker")
PROMPTS, GROUP, BATCH = 400, 4, 4
KILLS = 20


def token_of(task: str, policy: str) -> int:
    """What the rows of this task and policy are filled with, so that a mix-up is seen."""
    return zlib.crc32(f"{task}/{policy}".encode()) % 30_000 + 1


def rows_of(lease: TaskLease) -> Mapping[str, Columns]:
    length = 20 + zlib.crc32(lease.attempt.encode()) % 200
    return {policy: trajectory(length, token_of(lease.task.id, policy)) for policy in POLICIES}


def check_rows(samples: Sequence[BatchSample], arrays: Sequence[Mapping[str, Any]]) -> None:
    for sample, row in zip(samples, arrays, strict=True):
        assert len(row["tokens"]) == sample.tokens
        assert (row["tokens"] == token_of(sample.task, sample.policy)).all()


class Trainer(Seat):
    """Leases batches of one policy, whole or streamed, reads them and commits; it is never restarted."""

    def __init__(self, policy: str, client: DataflowClient, reader: PayloadReader, least: int) -> None:
        super().__init__(policy, client)
        self.trained: Counter[tuple[str, str]] = Counter()  # (task, policy) of committed samples
        self._reader = reader
        self._least = least

    async def run(self) -> None:
        await self.join()
        going = True
        while going:
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


class Killer:
    """kill -9 of one process after the other, each started again at once."""

    def __init__(self, processes: Processes, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._processes = processes
        self._random = random.Random(seed)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0.3, 2.0))
            role = self._random.choice(self._processes.roles)
            role.kill()
            self.killed[role.name] += 1
            role.start()


async def play_all(processes: Processes, acked: set[str]) -> tuple[dict[str, Trainer], Killer]:
    folder = processes.folder
    client = await processes.ready()
    close: list[Any] = [client]

    def note(lease: TaskLease, ack: Ack) -> None:
        if ack.accepted:
            acked.add(lease.task.id)

    def reader(remote: bool) -> PayloadReader:
        made = PayloadReader(client.units, folder.token, allow_map=not remote)
        close.append(made)
        return made

    def producer(number: int) -> Producers:
        writer = UnitWriter(client.units, folder.token, allow_local=number % 2 == 0)
        close.append(writer)
        return Producers(f"node-{number}", client, writer, POLICIES, rows_of, note, deadline=90.0)

    def handled(samples: Sequence[BatchSample], arrays: Sequence[Mapping[str, Any]]) -> bool:
        check_rows(samples, arrays)
        return True

    trainers = {
        "solver": Trainer("solver", client, reader(remote=False), least=0),
        "checker": Trainer("checker", client, reader(remote=True), least=1),
    }
    killer = Killer(processes, seed=7)
    stage = ("solver", "reference")
    background = [asyncio.create_task(forever(client, reader(n == 0), stage, handled)) for n in range(2)]
    background += [asyncio.create_task(until_over(producer(n))) for n in range(8)]
    killing = asyncio.create_task(killer.run())
    try:
        async with asyncio.timeout(280):
            await asyncio.gather(*(trainer.run() for trainer in trainers.values()))
    finally:
        for task in (*background, killing):
            task.cancel()
        await asyncio.gather(*background, killing, return_exceptions=True)
        for thing in reversed(close):
            await thing.close()
    return trainers, killer


async def forever(client: DataflowClient, reader: PayloadReader, stage: tuple[str, str], handled: Any) -> None:
    while True:
        try:
            await consume_stage(client, reader, stage, 2, handled)
        except RillflowError:
            await asyncio.sleep(0.1)  # its lease was lost, or a unit was down for too long: it goes on


async def until_over(producer: Producers) -> None:
    while True:
        try:
            await producer.run(2)
            return
        except RillflowError:
            await asyncio.sleep(0.1)


@pytest.mark.chaos
@pytest.mark.timeout(330)
async def test_nothing_is_lost_and_nothing_trained_twice(tmp_path: Path) -> None:
    policies = {
        "solver": {"stages": ["reference"], "trainer": {"batch_groups": BATCH, "steps": 10_000}},
        "checker": {"trainer": {"batch_groups": BATCH, "steps": 10_000}},
    }
    flow = {"group_size": GROUP, "staleness": 1000, "units": {"count": 2}, "task_lease": 10.0, "batch_lease": 20.0}
    folder = make_run(tmp_path, PROMPTS, policies, flow)
    acked: set[str] = set()
    with Processes(folder, 2) as processes:
        trainers, killer = await play_all(processes, acked)
    report = audit(folder.ledger)
    assert report.balanced, (report.to_dict(), last_lines(folder, "dataflow"))
    assert sum(killer.killed.values()) >= KILLS, killer.killed
    assert set(killer.killed) == {"dataflow", "unit-0", "unit-1"}
    for policy, trainer in trainers.items():
        assert set(trainer.trained.values()) == {1}, "a sample was trained twice"
        assert {task for task, _ in trainer.trained} >= acked, "an acknowledged sample was lost"
        assert len(trainer.trained) == PROMPTS * GROUP, policy
