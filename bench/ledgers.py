"""What one ledger carries against several, each in a process of its own.

    python -m bench.ledgers [--quick] [--ledgers 1,2] [--json FILE]

Nodes lease tasks, beat and complete; a trainer leases and commits whole batches. All go through the client that a run
uses (`clients.ledgers`) and over HTTP to real services. Episodes and training take no time, and every sample refers to
a stored row, so the ledgers are what is measured. `carried` is samples a second from prompt to step on this machine:
with few cores, the services and their clients share them. `one core each` is what the busiest ledger's processor time
for a sample comes to: samples a second where every ledger has a core to itself, and the clients have others.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.common import Report, parser
from bench.scale_costs import Meter
from bench.traffic import Processes, Seat, describe, make_run, trajectory
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.units import UnitWriter
from rillflow.types import CompleteTask, Heartbeat, LeaseTasks, Row, TaskLease
from rillflow.types.runs import ledger_of

MAIN, GROUP, BATCH, NODES, SLOTS = "main", 8, 64, 16, 64
FOREVER = 3600.0
_ROW = trajectory(1000)


@dataclass(frozen=True)
class Step:
    """One step: its seconds, and the processor time of each ledger."""

    seconds: float
    busy: tuple[float, ...]


class Load:
    """The nodes and the trainer of one run, each with a client of its own."""

    def __init__(self, clients: Sequence[DataflowClient], places: Sequence[Row], meters: Sequence[Meter]) -> None:
        self._clients = clients
        self._places = places  # a stored row of each ledger
        self._meters = meters
        self._seat = Seat(MAIN, clients[0])

    async def join(self) -> None:
        await self._seat.join()

    async def step(self) -> Step:
        """Play and train as many samples as a batch has."""
        for meter in self._meters:
            meter.start()
        began = time.perf_counter()
        while (batch := (await self._seat.lease(BATCH, wait=0.0)).batch) is None:
            await asyncio.gather(*(self._play(number) for number in range(NODES)))
        await self._seat.commit(batch, restorable=self._seat.version)
        seconds = time.perf_counter() - began
        return Step(seconds, tuple(meter.stop() for meter in self._meters))

    async def _play(self, number: int) -> None:
        """Lease a node's part of a batch, beat once and complete all of it."""
        client, node, versions = self._clients[number], f"n{number}", {MAIN: self._seat.version}
        leases: list[TaskLease] = []
        want = BATCH * GROUP // NODES
        while want > len(leases):
            ask = LeaseTasks(node=node, incarnation="1", want=want - len(leases), versions=versions)
            leases += (await client.lease_tasks(ask)).leases
        held = [lease.attempt for lease in leases]
        await client.heartbeat(Heartbeat(node=node, incarnation="1", attempts=held, versions=versions, capacity=SLOTS))
        await asyncio.gather(*(client.complete(self._news(node, lease)) for lease in leases))

    def _news(self, node: str, lease: TaskLease) -> CompleteTask:
        place = self._places[ledger_of(lease.attempt)]
        return CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=node,
            reward=float(lease.task.place % 2),
            samples=[describe(MAIN, _ROW, place, self._seat.version)],
            calls=1,
            seconds=1.0,
        )


async def measure(ledgers: int, steps: int) -> list[Step]:
    """Steps over so many ledgers, without the first ones, which prepare what is prepared once."""
    warm = 2
    with tempfile.TemporaryDirectory() as parent:
        policy = {"trainer": {"batch_groups": BATCH, "steps": 1_000_000}}
        flow = {
            "ledgers": ledgers,
            "group_size": GROUP,
            "staleness": 8,
            "task_lease": FOREVER,
            "node_timeout": FOREVER,
            "units": {"count": 1},
        }
        # The ledgers' prompts differ in number: enough that none of them runs out.
        folder = make_run(Path(parent), BATCH * (steps + warm + 20) * 2, {MAIN: policy}, flow)
        with Processes(folder, 1) as processes:
            clients = [await processes.ready() for _ in range(NODES)]
            writer = UnitWriter(clients[0].units, folder.token)
            try:
                places = [(await writer.put([_ROW], ledger=number))[0] for number in range(ledgers)]
                pids = [role.process.pid for role in processes.roles[:ledgers] if role.process is not None]
                load = Load(clients, places, [Meter(pid) for pid in pids])
                await load.join()
                return [await load.step() for _ in range(warm + steps)][warm:]
            finally:
                await writer.close()
                await asyncio.gather(*(client.close() for client in clients))


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--ledgers", default="1,2", help="numbers of ledgers")
    given = made.parse_args()
    report = Report("ledgers")
    samples = BATCH * GROUP
    for ledgers in map(int, given.ledgers.split(",")):
        steps = asyncio.run(measure(ledgers, 8 if given.quick else 40))
        what = f"{ledgers} ledger{'s' * (ledgers > 1)}"
        busiest = median(max(step.busy) for step in steps)
        report.add(
            f"{what}: carried, {os.cpu_count()} cores for all", samples / median(s.seconds for s in steps), None,
            unit="samples/s",
        )  # fmt: skip
        report.add(f"{what}: one core each", samples / busiest, None, unit="samples/s")
        report.add(
            f"{what}: processor time of all", median(sum(s.busy) for s in steps) / samples * 1e6, None,
            unit="microseconds a sample",
        )  # fmt: skip
    report.finish(given.json)


if __name__ == "__main__":
    main()
