"""Traffic for a real dataflow service: its processes, producers that play nodes, consumers that play stages.

Everything goes through the clients that nodes and trainers use; only the episodes and the training are left out, so
that what is measured (or killed) is the dataflow layer alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.config.load import validate
from rillflow.errors import RillflowError, RunError
from rillflow.resources.placement import Placed, ledgers
from rillflow.resources.placement import units as placed_units
from rillflow.runtime.folder import RunFolder
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    BatchSample,
    CommitBatch,
    CommitStage,
    CompleteTask,
    Heartbeat,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    SampleMeta,
    TaskLease,
)

Columns = dict[str, np.ndarray]

START_SECONDS = 300.0
COLUMNS = {
    "tokens": "<i4",
    "mask": "|u1",
    "logprobs": "<f4",
    "raw_logprobs": "<f4",
    "temperatures": "<f4",
    "versions": "<i4",
}


def trajectory(length: int, token: int = 1) -> Columns:
    """The six columns of one trajectory; the first token is the prompt's."""
    row = {name: np.ones(length, dtype) for name, dtype in COLUMNS.items()}
    row["tokens"][:] = token
    row["mask"][0] = 0
    row["versions"][:] = 0
    return row


def make_run(parent: Path, prompts: int, policies: Mapping[str, Any], dataflow: Mapping[str, Any]) -> RunFolder:
    """A run folder whose roles can be started one by one; no model is ever loaded."""
    source = parent / "prompts.jsonl"
    source.write_text("".join(f'{{"id": "{n}"}}\n' for n in range(prompts)))
    recipe = validate(
        {
            "name": "traffic",
            "policies": {name: {"model": "tiny", **settings} for name, settings in policies.items()},
            "workflow": "rillflow.examples.stockroom:play",
            "data": {"prompts": {"path": str(source)}, "epochs": 1, "shuffle": False},
            "dataflow": {"filters": [], **dataflow},
        }
    )
    return RunFolder.create(recipe, parent)


@dataclass
class Role:
    """One process of the run, started again where it was when it has been killed."""

    folder: RunFolder
    placed: Placed
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.placed.name

    def start(self) -> None:
        command = [sys.executable, "-m", "rillflow", *self.placed.arguments(self.folder.root)]
        with open(self.folder.log(self.name), "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "NO_COLOR": "1"})

    def kill(self) -> None:
        """As if the power had gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass
class Processes:
    """The dataflow services of a run, one for each ledger, and so many storage units for each of them."""

    folder: RunFolder
    units: int = 2
    roles: list[Role] = field(default_factory=list)

    def __enter__(self) -> Processes:
        recipe = self.folder.recipe
        units = recipe.dataflow.units.model_copy(update={"count": self.units})
        flow = recipe.dataflow.model_copy(update={"units": units})
        placed = (*ledgers(recipe), *placed_units(recipe.model_copy(update={"dataflow": flow})))
        self.roles = [Role(self.folder, one) for one in placed]
        for role in self.roles:
            role.start()
        return self

    def __exit__(self, *_: object) -> None:
        for role in reversed(self.roles):
            role.stop()

    async def ready(self) -> DataflowClient:
        """A client, once the service answers and knows its units."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            client = self.client()
            try:
                if client is not None and len((await client.units(deadline=1.0)).units) == self._units_in_all:
                    return client
            except RillflowError:
                pass
            if client is not None:
                await client.close()
            await asyncio.sleep(0.1)
        raise RunError(f"the processes did not start within {START_SECONDS:.0f} s", f"see {self.folder.root}/logs")

    @property
    def _units_in_all(self) -> int:
        return sum(role.placed.role == "unit" for role in self.roles)

    def client(self) -> DataflowClient | None:
        address = self.folder.address
        return None if address is None else connect(address, self.folder.token)


# ---------------------------------------------------------------- producers


def describe(policy: str, row: Columns, place: Any, version: int = 0) -> SampleMeta:
    tokens = len(row["tokens"])
    return SampleMeta(
        policy=policy,
        row=place,
        tokens=tokens,
        trained=tokens - 1,
        oldest=version,
        newest=version,
        reward=float(tokens % 2),
    )


@dataclass
class Producers:
    """A node whose `count` episodes take no time: each leases, puts and completes one task after the other."""

    name: str
    client: DataflowClient
    writer: UnitWriter
    policies: Sequence[str]
    rows: Callable[[TaskLease], Mapping[str, Columns]]  # by policy
    on_ack: Callable[[TaskLease, Ack], None] = lambda lease, ack: None
    versions: Mapping[str, int] = field(default_factory=dict)
    deadline: float = 60.0

    def __post_init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._held: set[str] = set()
        self.completed = 0

    async def run(self, count: int, total: int | None = None) -> None:
        """`count` episodes at once, until `total` tasks were leased, or until the run says that it is over."""
        tasks: asyncio.Queue[TaskLease | None] = asyncio.Queue(count)
        beats = asyncio.create_task(self._beat())
        try:
            await asyncio.gather(self._lease(tasks, count, total), *(self._play(tasks) for _ in range(count)))
        finally:
            beats.cancel()

    async def _lease(self, tasks: asyncio.Queue[TaskLease | None], count: int, total: int | None) -> None:
        leased = 0
        while total is None or leased < total:
            ask = LeaseTasks(
                node=self.name,
                incarnation=self._incarnation,
                want=count if total is None else min(count, total - leased),
                versions={policy: self.versions.get(policy, 0) for policy in self.policies},
                wait=1.0,
            )
            reply = await self.client.lease_tasks(ask)
            leased += len(reply.leases)
            for lease in reply.leases:
                self._held.add(lease.attempt)
                await tasks.put(lease)
            if reply.phase != "training":
                break
        for _ in range(count):
            await tasks.put(None)

    async def _play(self, tasks: asyncio.Queue[TaskLease | None]) -> None:
        while (lease := await tasks.get()) is not None:
            try:
                await self.finish(lease)
            finally:
                self._held.discard(lease.attempt)

    async def finish(self, lease: TaskLease) -> None:
        made = self.rows(lease)
        places = await self.writer.put(list(made.values()), self.deadline)
        news = CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=self.name,
            reward=float(lease.task.place % 2),
            samples=[
                describe(p, row, place, self.versions.get(p, 0))
                for (p, row), place in zip(made.items(), places, strict=True)
            ],
            calls=1,
            seconds=0.01,
        )
        ack = await self.client.complete(news, self.deadline)
        self.completed += ack.accepted
        self.on_ack(lease, ack)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            beat = Heartbeat(
                node=self.name,
                incarnation=self._incarnation,
                attempts=list(self._held),
                versions={policy: self.versions.get(policy, 0) for policy in self.policies},
                capacity=1024,
            )
            try:
                await self.client.heartbeat(beat, 5.0)
            except RillflowError:
                continue  # the next one may be heard


# ---------------------------------------------------------------- consumers


class Seat:
    """A trainer's side of the wire: joins, leases, commits and counts its versions; the training is its owner's."""

    def __init__(self, policy: str, client: DataflowClient) -> None:
        self.policy = policy
        self.version = 0
        self._client = client
        self._incarnation = uuid.uuid4().hex

    async def join(self) -> None:
        await self._client.join(JoinTrainer(policy=self.policy, incarnation=self._incarnation, checkpoint=0))

    async def lease(
        self, groups: int, *, wait: float = 10.0, attempt: str = "", have: int = 0, least: int = 0
    ) -> BatchReply:
        """Under an attempt of its own unless one is given."""
        ask = LeaseBatch(
            policy=self.policy,
            incarnation=self._incarnation,
            attempt=attempt or uuid.uuid4().hex,
            groups=groups,
            version=self.version,
            wait=wait,
            have=have,
            least=least,
        )
        return await self._client.lease_batch(ask)

    async def commit(self, batch: Batch, *, step: float = 0.1, restorable: int = 0, deadline: float = 30.0) -> None:
        news = CommitBatch(
            policy=self.policy,
            incarnation=self._incarnation,
            batch=batch.id,
            attempt=batch.attempt,
            version=self.version + 1,
            metrics={},
            step_seconds=step,
            wait_seconds=0.0,
            restorable=restorable,
        )
        await self._client.commit(news, deadline)
        self.version += 1


async def consume_stage(
    client: DataflowClient,
    reader: PayloadReader,
    stage: tuple[str, str],
    groups: int,
    seen: Callable[[Sequence[BatchSample], Sequence[Mapping[str, Any]]], bool],
) -> None:
    """One worker of the stage (policy, name): micro-batches of up to `groups` groups, read and marked as handled.

    It goes on for as long as `seen(samples, arrays)` says so; without a micro-batch it is asked with nothing.
    """
    policy, name = stage
    going = True
    while going:
        ask = LeaseStage(policy=policy, stage=name, attempt=uuid.uuid4().hex, groups=groups, wait=0.5)
        batch = (await client.lease_stage(ask)).batch
        if batch is None:
            going = seen([], [])
            continue
        arrays = await reader.read([sample.row for sample in batch.samples], list(COLUMNS))
        await client.commit_stage(
            CommitStage(policy=policy, stage=name, batch=batch.id, attempt=batch.attempt, columns=[])
        )
        going = seen(batch.samples, arrays)


def last_lines(folder: RunFolder, name: str, count: int = 20) -> str:
    """The end of a role's log, for messages."""
    path = folder.log(name)
    return "\n".join(path.read_text().splitlines()[-count:]) if path.is_file() else json.dumps(None)
