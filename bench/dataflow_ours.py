"""Our side of `bench.dataflow`: the dataflow service, storage units, producers and consumers as processes of their own.

Everything is durable when it is acknowledged (fsync of payload and ledger). A put is a row written by `UnitWriter` and
its task completed; a get is a batch leased and its columns read by `PayloadReader`, verified.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.traffic import COLUMNS, Processes, Producers, Seat, consume_stage, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.runtime.folder import RunFolder
from rillflow.types import CompleteTask, LeaseTasks, SampleMeta, TaskLease

MAIN, STAGE, GROUP = "main", "reference", 8
LEASE = 600.0  # nobody is to be given up


@dataclass
class Peers:
    """What a producer or a trainer holds in its process."""

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
    prompts: int, group: int, batch: int, *, units: int = 1, stage: bool = False, drop_after: float = 600.0
) -> AsyncIterator[Any]:
    """The processes of a run with `prompts` groups of `group` tasks, and peers of this process."""
    with tempfile.TemporaryDirectory() as parent:
        policy = {"stages": [STAGE] if stage else [], "trainer": {"batch_groups": batch, "steps": 1_000_000}}
        flow = {
            "group_size": group,
            "staleness": 0,
            "units": {"count": units, "drop_after": drop_after},
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
        began = time.perf_counter()
        places = await self._mine.writer.put(self._data, 120.0)
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
        put = time.perf_counter() - began
        began = time.perf_counter()
        batch = (await self.seat.lease(1)).batch
        assert batch is not None
        arrays = await self._mine.reader.read([sample.row for sample in batch.samples], self._names)
        get = time.perf_counter() - began
        assert all(np.array_equal(a[n], d[n]) for a, d in zip(arrays, self._data, strict=True) for n in self._names)
        await self.seat.commit(batch, restorable=self.seat.version + 1)
        return {"put": put, "get": get}


def raw_disk(size: int) -> float:
    """Seconds in which the disk takes so many bytes, preallocated, written and synced: the bound of any put."""
    data = memoryview(np.random.default_rng(1).bytes(size))
    with tempfile.NamedTemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)
        began = time.perf_counter()
        for at in range(0, size, 4 << 20):
            os.write(file.fileno(), data[at : at + (4 << 20)])
        os.fdatasync(file.fileno())
        return time.perf_counter() - began


# ---------------------------------------------------------------- (b) ragged rows, from one producer


async def ragged(lengths: Sequence[int], single: int, batch: int) -> dict[str, float]:
    """The first `single` rows one after the other, the rest as 64 episodes at once; then all of them in batches."""
    rows = [trajectory(length) for length in lengths]
    groups = len(rows) // GROUP
    async with running(groups, GROUP, groups) as (_, mine):
        leases = await _lease_all(mine.client, len(rows))
        todo = iter(rows)
        node = Producers("n", mine.client, mine.writer, [MAIN], lambda lease: {MAIN: next(todo)})
        began = time.perf_counter()
        for lease in leases[:single]:
            await node.finish(lease)
        one = (time.perf_counter() - began) / single
        limit = asyncio.Semaphore(64)

        async def finish(lease: TaskLease) -> None:
            async with limit:
                await node.finish(lease)

        began = time.perf_counter()
        await asyncio.gather(*map(finish, leases[single:]))
        many = (time.perf_counter() - began) / (len(rows) - single)
        seat = Seat(MAIN, mine.client)
        await seat.join()
        began = time.perf_counter()
        batch_of_all = (await seat.lease(groups)).batch
        assert batch_of_all is not None
        places = [sample.row for sample in batch_of_all.samples]
        for at in range(0, len(places), batch):
            await mine.reader.read(places[at : at + batch], list(COLUMNS))
        get = (time.perf_counter() - began) / len(places)
        return {"put": one, "put_many": many, "get": get}


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
        await mine.client.units()  # the connection is there
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
    lengths: Sequence[int], producers: int, producer_processes: int, consumers: int, micro: int
) -> dict[str, float]:
    """A micro-batch is up to `micro` rows, in whole groups; consumers are workers of a stage before the update."""
    groups = len(lengths) // GROUP
    share = len(lengths) // producer_processes
    context = multiprocessing.get_context("spawn")
    async with running(groups, GROUP, groups, units=2, stage=True) as (folder, mine):
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
        began = time.perf_counter()
        seconds = await _consume(folder, mine.client, consumers, micro // GROUP, len(lengths)) - began
        for maker in makers:
            await asyncio.to_thread(maker.join, 30)
        return {"stream": seconds / len(lengths), "rows": len(lengths)}
