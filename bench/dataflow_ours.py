"""Our side of `bench.dataflow`: the dataflow service, storage units, producers and consumers as processes of their own.

A put is a row written by `UnitWriter`, with the durability asked for, and its task completed in the ledger, which is
synced; a get is a batch leased and its columns read by `PayloadReader`, verified.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.cores import Moment
from bench.traffic import COLUMNS, Processes, Producers, Seat, consume_stage, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.runtime.folder import RunFolder
from rillflow.types import CompleteTask, Durability, LeaseTasks, SampleMeta, TaskLease

MAIN, STAGE, GROUP = "main", "reference", 8
LEASE = 600.0  # no node may time out


@dataclass
class Peers:
    """The clients of a producer or a trainer."""

    client: DataflowClient
    writer: UnitWriter
    reader: PayloadReader

    async def close(self) -> None:
        await self.writer.close()
        await self.reader.close()
        await self.client.close()


def peers(folder: RunFolder, client: DataflowClient) -> Peers:
    return Peers(client, UnitWriter(client.units, folder.token), PayloadReader(client.units, folder.token))


@asynccontextmanager
async def running(
    durability: Durability,
    prompts: int,
    group: int,
    batch: int,
    *,
    units: int = 1,
    stage: bool = False,
    drop_after: float = 600.0,
) -> AsyncIterator[Any]:
    """The processes of a run with `prompts` groups of `group` tasks, and peers of this process."""
    with tempfile.TemporaryDirectory() as parent:
        policy = {
            "stages": {STAGE: {"kind": STAGE}} if stage else {},
            "trainer": {"batch_groups": batch, "steps": 1_000_000},
        }
        flow = {
            "group_size": group,
            "staleness": 0,
            "units": {"count": units, "drop_after": drop_after, "durability": durability},
            "task_lease": LEASE,
            "node_timeout": LEASE,
        }
        folder = make_run(Path(parent), prompts, {MAIN: policy}, flow)
        with Processes(folder, units) as processes:
            mine = peers(folder, await processes.ready())
            try:
                yield folder, mine
            finally:
                await mine.close()


# ---------------------------------------------------------------- (a) one large rectangle


class Rectangle:
    """Rows of one episode, put and served as one batch."""

    def __init__(self, mine: Peers, rows: int, columns: int, width: int) -> None:
        self._mine = mine
        self._names = [f"c{n}.f4" for n in range(columns)]
        generator = np.random.default_rng(0)
        self._data = [{name: generator.random(width, np.float32) for name in self._names} for _ in range(rows)]
        self._width = width
        self.seat = Seat(MAIN, mine.client)

    async def round(self) -> dict[str, float]:
        ask = LeaseTasks(node="n", incarnation="1", want=1, versions={MAIN: self.seat.version}, wait=10.0)
        (lease,) = (await self._mine.client.lease_tasks(ask)).leases
        began = Moment.now()
        places = await self._mine.writer.put(self._data, 120.0)
        written = time.perf_counter()
        samples = [
            SampleMeta(
                policy=MAIN,
                row=place,
                tokens=self._width,
                trained=1,
                oldest=self.seat.version,
                newest=self.seat.version,
                reward=1.0,
            )
            for place in places
        ]
        news = CompleteTask(
            task=lease.task.id, attempt=lease.attempt, node="n", reward=1.0, samples=samples, calls=1, seconds=0.1
        )
        await self._mine.client.complete(news)
        spent = began.passed("put") | {"rows": written - began.wall}
        began = Moment.now()
        batch = (await self.seat.lease(1)).batch
        assert batch is not None
        arrays = await self._mine.reader.read([sample.row for sample in batch.samples], self._names)
        spent |= began.passed("get")
        assert all(np.array_equal(a[n], d[n]) for a, d in zip(arrays, self._data, strict=True) for n in self._names)
        await self.seat.commit(batch, restorable=self.seat.version + 1)
        return spent


def disk_write(size: int, *, synced: bool) -> float:
    """Return the seconds of writing `size` bytes into a new preallocated file: the bound of any put."""
    data = memoryview(np.random.default_rng(1).bytes(size))
    with tempfile.NamedTemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)
        began = time.perf_counter()
        for at in range(0, size, 4 << 20):
            os.write(file.fileno(), data[at : at + (4 << 20)])
        if synced:
            os.fdatasync(file.fileno())
        return time.perf_counter() - began


def disk_sync(count: int) -> float:
    """Return the median seconds of a write of 4 KiB into a preallocated file and its sync."""
    with tempfile.NamedTemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, count << 12)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
        return statistics.median(times)


# ---------------------------------------------------------------- (b) ragged rows, from one producer


async def ragged(durability: Durability, lengths: Sequence[int], single: int, batch: int) -> dict[str, float]:
    """The first `single` rows one after the other, the rest as 64 episodes at once; then all of them in batches.

    `row` is a put without its completion, which waits for the ledger's sync.
    """
    rows = [trajectory(length) for length in lengths]
    groups = len(rows) // GROUP
    async with running(durability, groups, GROUP, groups) as (_, mine):
        leases = await _lease_all(mine.client, len(rows))
        todo = iter(rows)
        node = Producers("n", mine.client, mine.writer, [MAIN], lambda lease: {MAIN: next(todo)})
        began = Moment.now()
        for row in rows[:single]:
            await mine.writer.put([row])
        found = began.passed("row", single)
        began = Moment.now()
        for lease in leases[:single]:
            await node.finish(lease)
        found |= began.passed("put", single)
        limit = asyncio.Semaphore(64)

        async def finish(lease: TaskLease) -> None:
            async with limit:
                await node.finish(lease)

        began = Moment.now()
        await asyncio.gather(*map(finish, leases[single:]))
        found |= began.passed("put_many", len(rows) - single)
        seat = Seat(MAIN, mine.client)
        await seat.join()
        began = Moment.now()
        batch_of_all = (await seat.lease(groups)).batch
        assert batch_of_all is not None
        places = [sample.row for sample in batch_of_all.samples]
        for at in range(0, len(places), batch):
            await mine.reader.read(places[at : at + batch], list(COLUMNS))
        return found | began.passed("get", len(places))


async def _lease_all(client: DataflowClient, count: int) -> list[TaskLease]:
    leases: list[TaskLease] = []
    while len(leases) < count:
        ask = LeaseTasks(node="n", incarnation="1", want=count - len(leases), versions={MAIN: 0}, wait=5.0)
        leases += (await client.lease_tasks(ask)).leases
    return leases


# ---------------------------------------------------------------- (c) many producers, many consumers


def _produce(root: str, name: str, lengths: Sequence[int], count: int, together: Any) -> None:
    async def work() -> None:
        folder = RunFolder.open(root)
        client = Processes(folder).client()
        assert client is not None
        mine = peers(folder, client)
        rows = iter([trajectory(length) for length in lengths])
        node = Producers(name, mine.client, mine.writer, [MAIN], lambda lease: {MAIN: next(rows)})
        await mine.client.units()  # the connection is open
        together.wait(60)
        try:
            await node.run(count, len(lengths))
        finally:
            await mine.close()

    asyncio.run(work())


async def _consume(folder: RunFolder, client: DataflowClient, count: int, groups: int, total: int) -> float:
    """When the last row had been read; the consumers then end with their polls."""
    seen, ended = 0, 0.0
    reader = PayloadReader(client.units, folder.token)

    def note(samples: Sequence[Any], arrays: Sequence[Mapping[str, Any]]) -> bool:
        nonlocal seen, ended
        seen += len(arrays)
        if seen == total and not ended:
            ended = time.perf_counter()
        return seen < total

    try:
        await asyncio.gather(*(consume_stage(client, reader, (MAIN, STAGE), groups, note) for _ in range(count)))
    finally:
        await reader.close()
    return ended


async def streaming(
    durability: Durability,
    *,
    lengths: Sequence[int],
    producers: int,
    producer_processes: int,
    consumers: int,
    micro: int,
) -> dict[str, float]:
    """A micro-batch is up to `micro` rows, in whole groups; consumers are workers of a stage before the update."""
    groups = len(lengths) // GROUP
    share = len(lengths) // producer_processes
    context = multiprocessing.get_context("spawn")
    async with running(durability, groups, GROUP, groups, units=2, stage=True) as (folder, mine):
        together = context.Barrier(producer_processes + 1)
        makers = [
            context.Process(
                target=_produce,
                args=(
                    str(folder.root),
                    f"n{n}",
                    lengths[n * share :][:share],
                    producers // producer_processes,
                    together,
                ),
            )
            for n in range(producer_processes)
        ]
        for maker in makers:
            maker.start()
        await asyncio.to_thread(together.wait, 60)  # they have made their rows
        began = Moment.now()
        ended = await _consume(folder, mine.client, consumers, micro // GROUP, len(lengths))
        spent = began.passed("stream", len(lengths)) | {"stream": (ended - began.wall) / len(lengths)}
        for maker in makers:
            await asyncio.to_thread(maker.join, 30)
        return spent
