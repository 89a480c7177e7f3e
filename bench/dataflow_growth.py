"""How the cost of the dataflow layer grows: one run of up to a million samples, each leased, put, completed, trained.

One producer and one trainer speak to a real service and a real storage unit; rows are short, so that the ledger is what
is measured. The seconds of a sample at size n are those of the second half of the way to n: marginal, not averaged over
cheap beginnings. Memory is the resident set of the service's process.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import psutil

from bench.dataflow_ours import MAIN, Peers, running
from bench.traffic import Columns, Seat, describe, trajectory
from rillflow.types import CompleteTask, LeaseTasks, TaskLease

GROUP, BATCH, CHUNK = 8, 64, 256


@dataclass(frozen=True)
class Point:
    """At `samples`: seconds of one sample, megabytes of the service, megabytes of payload on the disk."""

    samples: int
    seconds: float
    resident: float
    stored: float


class Run:
    def __init__(self, mine: Peers, process: psutil.Process, folder: object) -> None:
        self.done = 0
        self._mine = mine
        self._process = process
        self._folder = folder
        self._seat = Seat(MAIN, mine.client)
        self._rows = [trajectory(32 + n % 64) for n in range(CHUNK)]

    async def go(self, sizes: list[int]) -> list[Point]:
        await self._seat.join()
        points = []
        for size in sizes:
            await self._until(size // 2)
            done, began = self.done, time.perf_counter()
            await self._until(size)
            seconds = (time.perf_counter() - began) / (self.done - done)
            points.append(Point(size, seconds, self._process.memory_info().rss / 1e6, self._stored()))
        return points

    def _stored(self) -> float:
        units = self._folder.root / "units"  # type: ignore[attr-defined]
        return sum(path.stat().st_blocks * 512 for path in units.rglob("*.seg")) / 1e6

    async def _until(self, samples: int) -> None:
        while self.done < samples:
            await self._produce()
            await self._train()

    async def _produce(self) -> None:
        """As many episodes as one batch needs."""
        left = GROUP * BATCH
        while left:
            ask = LeaseTasks(
                node="n", incarnation="1", want=min(left, CHUNK), versions={MAIN: self._seat.version}, wait=10.0
            )
            leases = (await self._mine.client.lease_tasks(ask)).leases
            rows = self._rows[: len(leases)]
            places = await self._mine.writer.put(rows)
            await asyncio.gather(*(self._complete(*one) for one in zip(leases, rows, places, strict=True)))
            left -= len(leases)
        self.done += GROUP * BATCH

    async def _complete(self, lease: TaskLease, row: Columns, place: object) -> None:
        news = CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node="n",
            reward=float(lease.task.place % 2),
            samples=[describe(MAIN, row, place, self._seat.version)],
            calls=1,
            seconds=0.1,
        )
        await self._mine.client.complete(news)

    async def _train(self) -> None:
        batch = (await self._seat.lease(BATCH)).batch
        assert batch is not None
        await self._seat.commit(batch, restorable=self._seat.version + 1)


async def grow(sizes: list[int]) -> list[Point]:
    async with running("process", sizes[-1] // GROUP + BATCH, GROUP, BATCH) as (folder, mine):
        service = next(
            child
            for child in psutil.Process().children(recursive=True)
            if child.cmdline()[2:4] == ["rillflow", "dataflow"]
        )
        return await Run(mine, service, folder).go(sizes)
