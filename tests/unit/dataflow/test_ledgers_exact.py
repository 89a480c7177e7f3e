"""A run over two ledgers is exact, whatever is lost or killed between the calls that make a step.

The ledgers are real and lie on a disk; only the wire is replaced. A call may be refused, may be taken though its answer
is lost, or may find its ledger killed and started again. The trainer that meets an error dies, and the next one goes on
from the last checkpoint. In the end every prompt of the epoch has ended, and the groups that the ledgers call trained
are those of the live line, each once. On-policy nothing can be too old: there every prompt is trained.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow_world import POLICY, RULES, UNIT, changed, prompts
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import Ledgers
from rillflow.dataflow.audit import audit_all
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.errors import RillflowError, Unavailable
from rillflow.types import (
    CommitBatch,
    CompleteTask,
    CompleteTasks,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    Row,
    SampleMeta,
    Taken,
    TaskLease,
    TasksTaken,
    UnitBeat,
    UnitInfo,
)
from rillflow.types.routes import Dataflow, Route
from rillflow.wire import Client
from soak import repetitions

PROMPTS, LEDGERS = 14, 2
_SHM = Path("/dev/shm")
Faults = Iterator[str]
ANSWERS: dict[Route[Any, Any], Callable[[Ledger], Callable[[Any], Any]]] = {
    Dataflow.lease_tasks: lambda ledger: ledger.lease_tasks,
    Dataflow.complete: lambda ledger: lambda news: _complete(ledger, news),
    Dataflow.join: lambda ledger: ledger.join_trainer,
    Dataflow.lease_batch: lambda ledger: ledger.lease_batch,
    Dataflow.commit: lambda ledger: ledger.commit_batch,
}


def _complete(ledger: Ledger, news: CompleteTasks) -> TasksTaken:
    return TasksTaken(taken=[Taken(ack=answer) for answer in ledger.complete_many(news.tasks)])  # type: ignore[arg-type]


class NearLedger(Client):
    """A ledger in this process, on a wire with faults."""

    def __init__(self, number: int, folder: Path, faults: Faults, staleness: int) -> None:
        super().__init__("http://near", "", peer=f"ledger {number}")
        self.path = folder / f"{number}.sqlite"
        self._rules = changed(
            RULES, ledger=number, ledgers=LEDGERS, epochs=1, staleness=staleness, batch_groups=1, group_size=2
        )
        self._faults = faults
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.path, self._rules, prompts(PROMPTS), hooks=Hooks())
        self.ledger.unit_beat(UnitBeat(info=UnitInfo(unit=UNIT, path="/u")))
        self.ledger.advance()
        self.ledger.commit()

    def trained(self) -> list[str]:
        return self.ledger.db.column("SELECT id FROM groups WHERE state = 'trained'")

    async def call(self, route: Route[Any, Any], body: Any, deadline: float = 30.0) -> Any:
        fault = "" if route is Dataflow.lease_tasks else next(self._faults, "")
        if fault == "killed":
            self.ledger.db.close()
            self.open()
        if fault in ("refused", "killed"):
            raise Unavailable(fault)
        answer = ANSWERS[route](self.ledger)(body)
        self.ledger.commit()
        if fault == "lost":
            raise Unavailable(fault)
        return answer


class Trainer:
    """Steps, writes a checkpoint now and then, dies of every error and comes back."""

    def __init__(self, client: DataflowClient, checkpoints: Iterator[bool]) -> None:
        self._client = client
        self._checkpoints = checkpoints
        self._lives = 0
        self._attempts = 0
        self.checkpoint = self.version = self.published = 0
        self.line: dict[int, list[str]] = {}  # what each version of the live line was trained on
        self.ended = False

    async def join(self) -> None:
        self._lives += 1
        while True:
            ask = JoinTrainer(
                policy=POLICY, incarnation=f"i{self._lives}", checkpoint=self.checkpoint, published=self.published
            )
            try:
                joined = await self._client.join(ask)
            except Unavailable:
                continue
            self.version, self._highest = joined.version, max(joined.highest, self.published)
            self.line = {version: groups for version, groups in self.line.items() if version <= self.checkpoint}
            assert joined.steps == len(self.line)
            return

    async def step(self) -> None:
        try:
            await self._step()
        except RillflowError:
            await self.join()

    async def _step(self) -> None:
        self._attempts += 1
        reply = await self._client.lease_batch(
            LeaseBatch(
                policy=POLICY,
                incarnation=f"i{self._lives}",
                attempt=f"a{self._attempts}",
                groups=LEDGERS,
                version=self.version,
                wait=0.0,
            )
        )
        self.ended = reply.phase != "training"
        if reply.batch is None:
            return
        version = self._highest + 1
        await self._client.commit(
            CommitBatch(
                policy=POLICY,
                incarnation=f"i{self._lives}",
                batch=reply.batch.id,
                attempt=reply.batch.attempt,
                version=version,
                metrics={},
                step_seconds=1.0,
                wait_seconds=1.0,
                restorable=self.checkpoint,
            )
        )
        self.line[version] = sorted({sample.group for sample in reply.batch.samples})
        self.version = self.published = self._highest = version
        if next(self._checkpoints, True):
            self.checkpoint = version


class Node:
    """Plays every task with the trainer's version, and repeats its report until it is acknowledged."""

    def __init__(self, client: DataflowClient, trainer: Trainer) -> None:
        self._client = client
        self._trainer = trainer
        self._rows = 0

    async def play(self) -> None:
        for _ in range(2 * LEDGERS):
            versions = {POLICY: self._trainer.version}
            ask = LeaseTasks(node="n", incarnation="1", want=8, versions=versions, wait=0.0)
            for lease in (await self._client.lease_tasks(ask)).leases:
                await self._tell(lease)

    async def _tell(self, lease: TaskLease) -> None:
        self._rows += 1
        version = self._trainer.version
        row = Row(unit=UNIT, segment=0, offset=8 * self._rows, length=8)
        reward = float(lease.task.place)
        sample = SampleMeta(policy=POLICY, row=row, tokens=2, trained=1, oldest=version, newest=version, reward=reward)
        news = CompleteTask(
            task=lease.task.id, attempt=lease.attempt, node="n", reward=reward, samples=[sample], calls=1, seconds=0.1
        )
        while True:
            try:
                await self._client.complete(news)
            except Unavailable:
                continue
            return


async def run_through(
    folder: Path, staleness: int, faults: list[str], deaths: list[bool], checkpoints: list[bool]
) -> None:
    drawn = iter(faults)
    ledgers = [NearLedger(number, folder, drawn, staleness) for number in range(LEDGERS)]
    client = DataflowClient(Ledgers(ledgers))
    trainer = Trainer(client, iter(checkpoints))
    node = Node(client, trainer)
    dying = iter(deaths)
    try:
        await trainer.join()
        for _ in range(200):
            await node.play()
            await trainer.step()
            if trainer.ended:
                break
            if next(dying, False):
                await trainer.join()
        assert trainer.ended, "the run does not get on"
        for near in ledgers:
            near.ledger.commit()
        report = audit_all([near.path for near in ledgers])
        assert report.balanced, [identity for identity in report.identities if not identity.ok]
        assert (report.counts["train.ended"], report.counts["train.outstanding"]) == (PROMPTS, 0)
        assert report.counts["steps"] == len(trainer.line)
        line = sorted(group for groups in trainer.line.values() for group in groups)
        assert line == sorted(group for near in ledgers for group in near.trained())
        assert len(line) == len(set(line))
        assert staleness or len(line) == PROMPTS
    finally:
        await client.close()
        for near in ledgers:
            near.ledger.db.close()


@settings(max_examples=repetitions(8, 100))
@given(
    staleness=st.sampled_from([0, 2]),
    faults=st.lists(st.sampled_from(["", "", "", "", "refused", "lost", "killed"]), max_size=60),
    deaths=st.lists(st.booleans(), max_size=10),
    checkpoints=st.lists(st.booleans(), max_size=10),
)
def test_what_is_trained_is_on_the_live_line_once_whatever_is_lost(
    staleness: int, faults: list[str], deaths: list[bool], checkpoints: list[bool]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=_SHM if _SHM.is_dir() else None))
    try:
        asyncio.run(run_through(folder, staleness, faults, deaths, checkpoints))
    finally:
        shutil.rmtree(folder)
