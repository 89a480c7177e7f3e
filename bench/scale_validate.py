"""Whether the model of `bench.scale` is right, where that can be seen on one machine.

A real dataflow service and two real storage units; nodes are processes that speak to them as rollout nodes do (one
question for tasks at a time, puts over HTTP, completions, heartbeats) and a trainer that leases, reads and commits. The
device is emulated: an episode sleeps for as long as its tokens take. The same run is simulated on the measured costs.

Then the ledger alone, at its end: completions as fast as it takes them, against what its cost per completion says.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.common import Report
from bench.gateway_load import Connection
from bench.scale_costs import Costs, Meter
from bench.scale_ledger import GROUP, MAIN, SLOTS, STALENESS, LedgerLoad
from bench.scale_model import Simulation
from bench.scale_world import Device, Work, World
from bench.traffic import COLUMNS, Processes, Seat, describe, make_run, trajectory
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.errors import RillflowError
from rillflow.runtime.folder import RunFolder
from rillflow.types import CompleteTask, CompleteTasks, Heartbeat, LeaseTasks, TaskLease

UNITS, WARM = 2, 4
LONGEST = 120.0  # seconds of a case, with the start of its processes
LEASE_WAIT, HEARTBEAT = 2.0, 2.0
DONE = "done"
WORK = Work(turns=1, mean_tokens=1000.0, sigma=0.5, most_tokens=4000.0, given_tokens=100, tool_seconds=0.0)
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """`train` are the seconds of a step."""

    name: str
    nodes: int
    groups: int
    train: float
    slots: int = 16
    token: float = 1e-3  # seconds of one, however many are decoded

    def world(self) -> World:
        tokens = self.groups * GROUP * (WORK.mean_tokens + WORK.given_tokens)
        return World(
            nodes=self.nodes,
            ranks=1,
            groups=self.groups,
            device=Device(step=self.token, sequence=0.0, train_rate=tokens / self.train),
            work=WORK,
            group_size=GROUP,
            staleness=4,
            slots=self.slots,
            units=UNITS,
        )


CASES = [Case(f"{nodes} node{'s' * (nodes > 1)}", nodes, 2 * nodes, 0.05) for nodes in (1, 2, 4, 8)]
CASES.append(Case("4 nodes, a slow trainer", 4, 8, 1.5))


# ---------------------------------------------------------------- one node


class EmulatedNode:
    """Leases, pushes and beats as `rollout.node` does; playing is sleeping."""

    def __init__(self, folder: RunFolder, name: str, case: Case, client: Any) -> None:
        self._name, self._case, self._client = name, case, client
        self._writer = UnitWriter(client.units, folder.token, allow_local=False)
        self._random = random.Random(name)
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        self._version = 0
        self.times: Times = defaultdict(list)

    async def run(self, done: Path) -> None:
        """Until there is such a file."""
        beating = asyncio.create_task(self._beats())
        end = time.monotonic() + LONGEST
        try:
            while not done.exists() and time.monotonic() < end:
                await self._lease_once()
        finally:
            for task in (beating, *self._playing.values()):
                task.cancel()
            await asyncio.gather(beating, *self._playing.values(), return_exceptions=True)
            await self._writer.close()

    async def _lease_once(self) -> None:
        room = self._case.slots - len(self._playing)
        if room <= 0:
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self._freed.wait()
            return
        asked = time.perf_counter()
        versions = {MAIN: self._version}
        ask = LeaseTasks(node=self._name, incarnation="1", want=room, versions=versions, wait=LEASE_WAIT)
        reply = await self._client.lease_tasks(ask)
        if reply.leases:
            self.times["lease"].append(time.perf_counter() - asked)
        for lease in reply.leases:
            self._playing[lease.attempt] = asyncio.create_task(self._play(lease, self._version))
        self._version = reply.heads[MAIN]

    async def _play(self, lease: TaskLease, version: int) -> None:
        mean = math.log(WORK.mean_tokens) - WORK.sigma**2 / 2
        tokens = min(self._random.lognormvariate(mean, WORK.sigma), WORK.most_tokens)
        await asyncio.sleep(tokens * self._case.token)
        row = trajectory(int(tokens) + WORK.given_tokens)
        began = time.perf_counter()
        (place,) = await self._writer.put([row], 60.0)
        put = time.perf_counter()
        news = CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=self._name,
            reward=float(lease.task.place % 2),
            samples=[describe(MAIN, row, place, version)],
            calls=1,
            seconds=tokens * self._case.token,
        )
        with suppress(RillflowError):  # a group that has expired meanwhile
            await self._client.complete(news, 60.0)
        self.times["put"].append(put - began)
        self.times["complete"].append(time.perf_counter() - put)
        self._playing.pop(lease.attempt, None)
        self._freed.set()

    async def _beats(self) -> None:
        while True:
            beat = Heartbeat(
                node=self._name,
                incarnation="1",
                attempts=list(self._playing),
                versions={MAIN: self._version},
                capacity=self._case.slots,
            )
            with suppress(RillflowError):
                await self._client.heartbeat(beat, 8.0)
            await asyncio.sleep(HEARTBEAT)


def _node(root: str, name: str, case: Case, answers: Any) -> None:
    async def work() -> Times:
        folder = RunFolder.open(root)
        client = Processes(folder).client()
        assert client is not None
        node = EmulatedNode(folder, name, case, client)
        try:
            await node.run(folder.root / DONE)
        finally:
            await client.close()
        return node.times

    answers.put({what: statistics.fmean(times) for what, times in asyncio.run(work()).items()})


# ---------------------------------------------------------------- a real run


async def _train(folder: RunFolder, client: Any, case: Case, seconds: float) -> dict[str, float]:
    """Return the samples a second during `seconds` after the warm steps, and the seconds of the trainer's calls."""
    reader = PayloadReader(client.units, folder.token, allow_map=False)
    seat, times, ends = Seat(MAIN, client), defaultdict[str, list[float]](list), list[tuple[float, int]]()
    await seat.join()
    end = time.monotonic() + LONGEST
    try:
        while time.monotonic() < end and not (len(ends) > WARM + 1 and ends[-1][0] > ends[WARM][0] + seconds):
            batch = (await seat.lease(case.groups, wait=2.0)).batch
            if batch is None:
                continue
            leased = time.perf_counter()
            await reader.read([sample.row for sample in batch.samples], list(COLUMNS))
            times["read"].append(time.perf_counter() - leased)
            tokens = sum(sample.tokens for sample in batch.samples)
            await asyncio.sleep(tokens / case.world().device.train_rate)
            began = time.perf_counter()
            await seat.commit(batch, restorable=seat.version + 1)
            times["commit"].append(time.perf_counter() - began)
            ends.append((time.perf_counter(), len(batch.samples)))
    finally:
        await reader.close()
    counted = ends[WARM:]
    rate = sum(number for _, number in counted[1:]) / (counted[-1][0] - counted[0][0])
    return {"rate": rate, **{what: statistics.fmean(taken[WARM:]) for what, taken in times.items()}}


async def measured(case: Case, seconds: float) -> dict[str, float]:
    """Run for `seconds`."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as parent:
        policy = {"trainer": {"batch_groups": case.groups, "steps": 1_000_000}}
        flow = {"group_size": GROUP, "staleness": 4, "units": {"count": UNITS}}
        folder = make_run(Path(parent), 100_000, {MAIN: policy}, flow)
        with Processes(folder, UNITS) as processes:
            client = await processes.ready()
            answers = context.Queue(case.nodes)
            names = [f"n{number}" for number in range(case.nodes)]
            nodes = [context.Process(target=_node, args=(str(folder.root), n, case, answers)) for n in names]
            for node in nodes:
                node.start()
            try:
                try:
                    found = await _train(folder, client, case, seconds)
                finally:
                    (folder.root / DONE).touch()
                times = [await asyncio.to_thread(answers.get, True, 60) for _ in nodes]
            finally:
                for node in nodes:
                    node.join(30)
                await client.close()
    return found | {what: statistics.fmean(one[what] for one in times) for what in ("lease", "put", "complete")}


def predicted(case: Case, costs: Costs) -> dict[str, float]:
    free = replace(costs, parts=replace(costs.parts, gateway_call=0.0, gateway_token=0.0))
    outcome = Simulation(case.world(), free).run(60, WARM)
    return {"rate": outcome.rate, **outcome.latency}


# ---------------------------------------------------------------- the ledger at its end


async def saturated(costs: Costs, together: int) -> tuple[float, float, float]:
    """Completions a second that the real ledger takes, that its costs say, and the share of a core that it had."""
    nodes = 64
    groups = 2 * nodes
    with tempfile.TemporaryDirectory() as parent:
        flow = {"group_size": GROUP, "staleness": STALENESS, "units": {"count": 1}, "node_timeout": 3600.0}
        flow |= {"task_lease": 3600.0}
        policy = {"trainer": {"batch_groups": groups, "steps": 1_000_000}}
        folder = make_run(Path(parent), groups * (STALENESS + 2), {MAIN: policy}, flow)
        with Processes(folder, 1) as processes:
            client = await processes.ready()
            process = processes.roles[0].process
            assert process is not None
            load = LedgerLoad(client, Meter(process.pid), nodes, groups)
            writer = UnitWriter(client.units, folder.token)
            (load.place,) = await writer.put([trajectory(1000)])
            for name in load.names(2 * nodes):
                await load.lease(name, SLOTS)
            leases = load.in_order()
            requests = _requests(load, leases, together, client.wire.url, folder.token)
            load.meter.start()
            seconds = await _sent(requests, int(client.wire.url.rpartition(":")[2]))
            used = load.meter.stop()
            await writer.close()
            await client.close()
    ledger = costs.ledger
    cost = ledger.complete_call.at(nodes) / together + ledger.complete_each.at(nodes)
    return len(leases) / seconds, 1 / cost, used / seconds


def _requests(load: LedgerLoad, leases: Sequence[TaskLease], together: int, url: str, token: str) -> list[bytes]:
    """Made before, so that the sender takes as little as can be of the machine."""
    made = []
    for at in range(0, len(leases), together):
        news = CompleteTasks(tasks=[load.news(lease) for lease in leases[at : at + together]])
        body = msgspec.msgpack.encode(news)
        head = (
            f"POST /tasks/complete HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n"
            f"authorization: Bearer {token}\r\ncontent-type: application/msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


async def _sent(requests: Sequence[bytes], port: int) -> float:
    left = iter(requests)

    async def send() -> None:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        for request in left:
            await connection.ask(request)
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(16)))
    return time.perf_counter() - began


# ---------------------------------------------------------------- telling


def validate(report: Report, costs: Costs, *, quick: bool) -> None:
    """Rows of predicted (ours) against measured (peer); the ratio says how far off the model is."""
    table = Table(title="predicted / measured; latencies in ms")
    names = ("rate", "lease", "put", "complete", "read", "commit")
    for heading in ("run", *names):
        table.add_column(heading, justify="right")
    for case in CASES:
        model, real = predicted(case, costs), asyncio.run(measured(case, 6.0 if quick else 20.0))
        for what in names:
            unit = "samples/s (peer: measured)" if what == "rate" else "s (peer: measured)"
            report.add(f"{case.name}: {what}", model[what], real[what], unit=unit)
        scale = {name: 1.0 if name == "rate" else 1e3 for name in names}
        table.add_row(case.name, *(f"{model[n] * scale[n]:.1f} / {real[n] * scale[n]:.1f}" for n in names))
    for together in (1, 16):
        real_rate, model_rate, share = asyncio.run(saturated(costs, together))
        name = f"ledger full, {together} completion{'s' * (together > 1)} a call"
        told = f"the service had {share:.0%} of a core"
        report.add(name, model_rate, real_rate, unit="completions/s (peer: measured)", reason=told)
    Console(stderr=True, width=140).print(table)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(CASES[0], 10.0))))
