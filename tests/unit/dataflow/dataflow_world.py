"""A ledger with a clock of its own and short words for what nodes and trainers do to it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rillflow.contracts import PromptSource
from rillflow.dataflow.audit import AuditReport, audit
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.hooks.filters.zero_variance import ZeroVariance
from rillflow.dataflow.ledger import Ledger
from rillflow.dataflow.rules import Rules
from rillflow.dataflow.sources import InOrder
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    CommitBatch,
    CompleteTask,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    Prompt,
    Row,
    SampleMeta,
    TaskLease,
    TrainerJoined,
)

POLICY = "main"
RULES = Rules(
    policy=POLICY,
    seed=7,
    group_size=2,
    staleness=0,
    batch_groups=2,
    total_steps=100,
    attempts=3,
    task_lease=30.0,
    batch_lease=300.0,
    node_timeout=10.0,
    max_failures=1000,
)


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def prompts(count: int, prefix: str = "p") -> PromptSource:
    return InOrder([Prompt(id=f"{prefix}{n}", payload={"n": n}) for n in range(count)])


def sample(oldest: int, newest: int | None = None, trained: int = 3) -> SampleMeta:
    return SampleMeta(
        policy=POLICY,
        row=Row(unit="u", segment=0, offset=0, length=8),
        tokens=5,
        trained=trained,
        oldest=oldest,
        newest=oldest if newest is None else newest,
        reward=0.0,
    )


class World:
    """One ledger; `crash` opens a copy of what is on disk, as if the process had been killed."""

    def __init__(
        self,
        folder: Path,
        *,
        source: PromptSource | None = None,
        heldout: PromptSource | None = None,
        hooks: Hooks | None = None,
        join: bool = True,
        **rules: object,
    ) -> None:
        self.clock = FakeClock()
        self.rules = replace(RULES, **rules)
        self.source = source or prompts(50)
        self.heldout = heldout
        self.hooks = hooks or Hooks(filters=[("zero_variance", ZeroVariance())])
        self.folder = folder
        self.crashes = 0
        self.incarnations = 0
        self.attempts = 0
        self.incarnation = ""
        self.path = folder / "ledger0.sqlite"
        self.ledger = self.open()
        if join:
            self.join()

    def open(self, resume: bool = False) -> Ledger:
        ledger = Ledger(
            self.path, self.rules, self.source, self.heldout, hooks=self.hooks, clock=self.clock, resume=resume
        )
        ledger.advance()
        ledger.commit()
        return ledger

    def crash(self, resume: bool = False) -> None:
        self.crashes += 1
        copy = self.folder / f"ledger{self.crashes}.sqlite"
        for suffix in ("", "-wal"):
            if Path(f"{self.path}{suffix}").exists():
                shutil.copy(f"{self.path}{suffix}", f"{copy}{suffix}")
        self.ledger.db.close()
        self.path = copy
        self.ledger = self.open(resume)

    def audit(self) -> AuditReport:
        self.ledger.commit()
        return audit(self.path)

    def check(self) -> dict[str, int]:
        report = self.audit()
        assert report.balanced, [identity for identity in report.identities if not identity.ok]
        return report.counts

    def close(self) -> None:
        self.ledger.db.close()

    # ------------------------------------------------------------ nodes

    def lease(self, want: int = 100, version: int | None = None, node: str = "n0", life: str = "a") -> list[TaskLease]:
        version = self.ledger.lineage.head if version is None else version
        ask = LeaseTasks(node=node, incarnation=life, want=want, versions={POLICY: version})
        return self.ledger.lease_tasks(ask).leases

    def beat(self, attempts: Sequence[str] = (), node: str = "n0", life: str = "a", version: int = 0) -> HeartbeatReply:
        return self.ledger.renew(
            Heartbeat(node=node, incarnation=life, attempts=list(attempts), versions={POLICY: version}, capacity=8)
        )

    def done(
        self,
        lease: TaskLease,
        reward: float | None = None,
        version: int | None = None,
        samples: list[SampleMeta] | None = None,
        node: str = "n0",
    ) -> Ack:
        version = self.ledger.lineage.head if version is None else version
        return self.ledger.complete(
            CompleteTask(
                task=lease.task.id,
                attempt=lease.attempt,
                node=node,
                reward=float(lease.task.place) if reward is None else reward,
                samples=[sample(version)] if samples is None else samples,
                calls=1,
                seconds=0.5,
            )
        )

    def fail(self, lease: TaskLease, cause: str = "timeout", node: str = "n0") -> Ack:
        return self.ledger.fail(
            FailTask(task=lease.task.id, attempt=lease.attempt, node=node, cause=cause, error="it hung")
        )

    def play_all(self) -> int:
        """Play everything that can be leased; returns how many episodes that were."""
        played = 0
        while leases := self.lease():
            for lease in leases:
                self.done(lease)
                played += 1
        return played

    # ------------------------------------------------------------ the trainer

    def join(self, checkpoint: int = 0, published: int = 0) -> TrainerJoined:
        self.incarnations += 1
        self.incarnation = f"i{self.incarnations}"
        return self.ledger.join_trainer(
            JoinTrainer(policy=POLICY, incarnation=self.incarnation, checkpoint=checkpoint, published=published)
        )

    def ask(self, attempt: str | None = None, groups: int | None = None) -> BatchReply:
        if attempt is None:
            self.attempts += 1
            attempt = f"a{self.attempts}"
        return self.ledger.lease_batch(
            LeaseBatch(
                policy=POLICY,
                incarnation=self.incarnation,
                attempt=attempt,
                groups=groups or self.rules.batch_groups,
                version=self.ledger.lineage.head,
                wait=0,
            )
        )

    def batch(self, groups: int | None = None) -> Batch:
        reply = self.ask(groups=groups)
        assert reply.batch is not None, reply.waiting_for
        return reply.batch

    def commit(self, batch: Batch, version: int | None = None) -> Ack:
        return self.ledger.commit_batch(
            CommitBatch(
                policy=POLICY,
                incarnation=self.incarnation,
                batch=batch.id,
                attempt=batch.attempt,
                version=self.ledger.lineage.highest + 1 if version is None else version,
                metrics={"loss": 0.5},
                step_seconds=1.0,
                wait_seconds=3.0,
            )
        )

    def step(self) -> Batch:
        self.play_all()
        batch = self.batch()
        self.commit(batch)
        return batch

    def group(self, group: str) -> tuple[str, str]:
        row = self.ledger.db.one("SELECT state, cause FROM groups WHERE id = ?", (group,))
        assert row is not None
        return row["state"], row["cause"]

    def task(self, task: str) -> str:
        return str(self.ledger.db.value("SELECT state FROM tasks WHERE id = ?", (task,)))
