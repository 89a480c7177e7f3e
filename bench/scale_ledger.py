"""What the dataflow service costs, measured at the real service over HTTP, as the run grows.

At each size so many nodes are known to it, and the window is as large as they need (weak scaling: the batch grows with
the nodes). Every number is processor time of the service's process, taken over many calls, less its housekeeping.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scale_costs import Curve, LedgerCosts, Meter, call_and_each
from bench.traffic import Processes, describe, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.units import UnitWriter
from rillflow.types import (
    CommitBatch,
    CompleteTask,
    CompleteTasks,
    Heartbeat,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    TaskLease,
)
from rillflow.types.routes import Dataflow

MAIN, GROUP, STALENESS, SLOTS = "main", 8, 8, 64
AT_ONCE = 8  # questions under way
FOREVER = 3600.0
_ROW = trajectory(1000)


@dataclass
class LedgerLoad:
    """Speaks to a service for all of its nodes."""

    client: DataflowClient
    meter: Meter
    nodes: int
    groups: int  # of a batch
    place: Any = None
    held: dict[str, list[TaskLease]] = field(default_factory=dict)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def measured(self, calls: Sequence[Callable[[], Awaitable[Any]]]) -> float:
        """Seconds of the service for each of the calls, some of which are always under way."""
        left = iter(calls)

        async def some() -> None:
            for call in left:
                await call()

        self.meter.start()
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        return self.meter.stop(len(calls))

    # ------------------------------------------------------------ nodes

    async def lease(self, node: str, want: int) -> None:
        ask = LeaseTasks(node=node, incarnation="1", want=want, versions={MAIN: 0}, wait=0.0)
        self.held.setdefault(node, []).extend((await self.client.lease_tasks(ask)).leases)

    async def beat(self, node: str, attempts: int = 0) -> None:
        held = [lease.attempt for lease in self.held.get(node, [])[:attempts]]
        beat = Heartbeat(node=node, incarnation="1", attempts=held, versions={MAIN: 0}, capacity=SLOTS)
        await self.client.heartbeat(beat)

    def news(self, lease: TaskLease) -> CompleteTask:
        return CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node="",
            reward=float(lease.task.place % 2),
            samples=[describe(MAIN, _ROW, self.place)],
            calls=1,
            seconds=1.0,
        )

    async def complete(self, leases: Sequence[TaskLease]) -> None:
        news = CompleteTasks(tasks=[self.news(lease) for lease in leases])
        taken = await self.client.wire.call(Dataflow.complete, news)
        assert all(one.ack and one.ack.accepted for one in taken.taken), taken

    def names(self, count: int) -> list[str]:
        return [f"n{number % self.nodes}" for number in range(count)]

    def in_order(self) -> list[TaskLease]:
        """All that was leased, the first group's tasks first."""
        leases = [lease for held in self.held.values() for lease in held]
        return sorted(leases, key=lambda lease: (lease.task.group, lease.task.place))

    # ------------------------------------------------------------ a trainer

    async def lease_rank(self, attempt: str, rank: int, ranks: int) -> Any:
        ask = LeaseBatch(
            policy=MAIN,
            incarnation=self.incarnation,
            attempt=attempt,
            groups=self.groups,
            version=0,
            wait=0.0,
            rank=rank,
            ranks=ranks,
        )
        return (await self.client.lease_batch(ask)).batch

    async def commit(self, batch: Any) -> None:
        news = CommitBatch(
            policy=MAIN,
            incarnation=self.incarnation,
            batch=batch.id,
            attempt=batch.attempt,
            version=1,
            metrics={},
            step_seconds=1.0,
            wait_seconds=0.0,
            restorable=1,
        )
        await self.client.commit(news, 120.0)


async def _nodes_side(load: LedgerLoad, calls: int) -> dict[str, float]:
    """Leases, heartbeats and completions, in the order in which a run has them."""
    found: dict[str, float] = {}
    await load.measured([lambda node=node: load.beat(node) for node in load.names(load.nodes)])  # type: ignore[misc]
    load.meter.start()
    await asyncio.sleep(1.0)
    found["idle"] = load.meter.idle = load.meter.stop()
    many = await load.measured([lambda n=n: load.lease(n, SLOTS) for n in load.names(load.nodes)])  # type: ignore[misc]
    one = await load.measured([lambda n=n: load.lease(n, 1) for n in load.names(calls)])  # type: ignore[misc]
    found["lease_call"], found["lease_each"] = call_and_each((1, one), (SLOTS, many))
    few = await load.measured([lambda n=n: load.beat(n) for n in load.names(calls)])  # type: ignore[misc]
    many = await load.measured([lambda n=n: load.beat(n, SLOTS) for n in load.names(calls)])  # type: ignore[misc]
    found["beat_call"], found["beat_each"] = call_and_each((0, few), (SLOTS, many))
    while sum(map(len, load.held.values())) < load.groups * (STALENESS + 1) * GROUP:
        await load.measured([lambda n=n: load.lease(n, SLOTS) for n in load.names(AT_ONCE)])  # type: ignore[misc]
    found["nothing"] = await load.measured([lambda n=n: load.lease(n, 1) for n in load.names(calls)])  # type: ignore[misc]
    ended = load.in_order()[: (load.groups - 1) * GROUP]  # all of a batch but its last group
    single = min(calls, len(ended) // 2) // GROUP * GROUP
    one = await load.measured([lambda lease=lease: load.complete([lease]) for lease in ended[:single]])  # type: ignore[misc]
    parts = [ended[at : at + 2 * GROUP] for at in range(single, len(ended), 2 * GROUP)]
    many = await load.measured([lambda part=part: load.complete(part) for part in parts])  # type: ignore[misc]
    size = statistics.fmean(map(len, parts))
    found["complete_call"], found["complete_each"] = call_and_each((1, one), (size, many))
    return found


async def _trainers_side(load: LedgerLoad) -> dict[str, float]:
    """One batch, leased by some of the ranks that a trainer of this run has; each sample's share of the cost."""
    ranks, samples, attempt = max(2, load.nodes // 2), load.groups * GROUP, uuid.uuid4().hex
    await load.client.join(JoinTrainer(policy=MAIN, incarnation=load.incarnation, checkpoint=0))
    looks = 5
    load.meter.start()
    for _ in range(looks):
        assert await load.lease_rank(attempt, 0, ranks) is None
    peek = load.meter.stop(looks) / (load.groups - 1)
    await load.complete(load.in_order()[samples - GROUP : samples])
    load.meter.start()
    first = await load.lease_rank(attempt, 0, ranks)
    opened = load.meter.stop()
    asked = min(ranks - 1, 8)
    load.meter.start()
    for rank in range(1, asked + 1):
        await load.lease_rank(attempt, rank, ranks)
    each = load.meter.stop(asked)
    load.meter.start()
    await load.commit(first)
    committed = load.meter.stop()
    return {
        "open": max(0.0, opened - each) / samples,
        "peek": peek,
        "rank": each / samples,
        "commit": committed / samples,
    }


async def measure_size(nodes: int, calls: int) -> dict[str, float]:
    """Measure everything with a new service that has `nodes` nodes."""
    groups = max(2 * nodes, 16)  # the window has place for the slots of all nodes, and a quarter more
    with tempfile.TemporaryDirectory() as parent:
        policy = {"trainer": {"batch_groups": groups, "steps": 1_000_000}}
        flow = {
            "group_size": GROUP,
            "staleness": STALENESS,
            "units": {"count": 1},
            "task_lease": FOREVER,
            "node_timeout": FOREVER,
        }
        folder = make_run(Path(parent), groups * (STALENESS + 2), {MAIN: policy}, flow)
        with Processes(folder, 1) as processes:
            client = await processes.ready()
            writer = UnitWriter(client.units, folder.token)
            process = processes.roles[0].process
            assert process is not None
            load = LedgerLoad(client, Meter(process.pid), nodes, groups)
            try:
                (load.place,) = await writer.put([_ROW])
                found = await _nodes_side(load, calls)
                return found | await _trainers_side(load) | {"sync": await _sync(load)}
            finally:
                await writer.close()
                await client.close()


async def _sync(load: LedgerLoad) -> float:
    """How long a caller that is alone waits beyond the processor time: the sync, the wire and the client.

    The lower quarter: other work of the machine is none of the service's.
    """
    waits = []
    for _ in range(50):
        began = time.perf_counter()
        load.meter.start()
        await load.beat("n0")
        waits.append(time.perf_counter() - began - load.meter.stop())
    return statistics.quantiles(waits, n=4)[0]


def measure_ledger(sizes: Sequence[int], calls: int = 400) -> LedgerCosts:
    found = []
    for size in sizes:
        began = time.monotonic()
        found.append(asyncio.run(measure_size(size, calls)))
        print(f"ledger with {size} nodes measured in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    names = [name for name in found[0] if name != "sync"]
    curves = {name: Curve(tuple(sizes), tuple(max(one[name], 0.0) for one in found)) for name in names}
    return LedgerCosts(**curves, sync=min(one["sync"] for one in found))
