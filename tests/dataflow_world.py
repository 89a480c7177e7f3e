"""A ledger with a clock of its own and short words for what nodes, units and trainers do to it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ledger_moves import check_moves, watch
from rillflow.contracts import PromptSource
from rillflow.dataflow.audit import AuditReport, audit
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.rules import PolicyRules, Rules
from rillflow.dataflow.sources import InOrder
from rillflow.types import (
    Ack,
    Batch,
    BatchReply,
    CommitBatch,
    CommitStage,
    CompleteTask,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    LoseRows,
    Prompt,
    Row,
    SampleColumns,
    SampleMeta,
    TaskLease,
    TrainerJoined,
    UnitBeat,
    UnitInfo,
)

POLICY = "main"
UNIT = "u"
RULES = Rules.single(
    POLICY,
    seed=7,
    group_size=2,
    staleness=0,
    batch_groups=2,
    total_steps=100,
    attempts=3,
    task_lease=30.0,
    batch_lease=300.0,
    node_timeout=10.0,
    unit_timeout=1e9,
    max_failures=1000,
)


def changed(rules: Rules, **values: Any) -> Rules:
    """The rules with other values; those of a policy are given to all policies."""
    policy = {field.name for field in fields(PolicyRules)}
    own = {name: values.pop(name) for name in list(values) if name in policy}
    policies = values.pop("policies", None) or {name: replace(found, **own) for name, found in rules.policies.items()}
    return replace(rules, policies=policies, **values)


def policies(**rules: dict[str, Any]) -> dict[str, PolicyRules]:
    """Return rules of several policies by name; the rest is as in `RULES`."""
    return {name: replace(RULES.policies[POLICY], name=name, **values) for name, values in rules.items()}


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def prompts(count: int, prefix: str = "p") -> PromptSource:
    return InOrder([Prompt(id=f"{prefix}{n}", payload={"n": n}) for n in range(count)])


def sample(
    oldest: int,
    newest: int | None = None,
    trained: int = 3,
    *,
    policy: str = POLICY,
    row: Row | None = None,
    tokens: int = 5,
    reward: float = 0.0,
) -> SampleMeta:
    return SampleMeta(
        policy=policy,
        row=row or Row(unit=UNIT, segment=0, offset=0, length=8),
        tokens=tokens,
        trained=trained,
        oldest=oldest,
        newest=oldest if newest is None else newest,
        reward=reward,
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
        **rules: Any,
    ) -> None:
        self.clock = FakeClock()
        self.rules = changed(RULES, **rules)
        self.source = source or prompts(50)
        self.heldout = heldout
        self.hooks = hooks or Hooks(filters=[("zero_variance", ZeroVariance())])
        self.folder = folder
        self.crashes = 0
        self.incarnations = 0
        self.attempts = 0
        self.asks = 0
        self.rows = 0
        self.rows_of: dict[tuple[str, str], Row] = {}
        self.incarnation = ""
        self.lives: dict[str, str] = {}  # the incarnation of each policy's trainer
        self.path = folder / "ledger0.sqlite"
        self.ledger = self.open()
        self.unit()
        if join:
            for policy in self.rules.policies:
                self.join(policy=policy)

    def open(self, resume: bool = False) -> Ledger:
        ledger = Ledger(
            self.path, self.rules, self.source, self.heldout, hooks=self.hooks, clock=self.clock, resume=resume
        )
        watch(ledger)
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
        check_moves(self.ledger)
        report = self.audit()
        assert report.balanced, [identity for identity in report.identities if not identity.ok]
        return report.counts

    def close(self) -> None:
        self.ledger.db.close()

    @property
    def policy(self) -> str:
        return self.rules.policy

    @property
    def head(self) -> int:
        return self.ledger.lineage.head(self.policy)

    # ------------------------------------------------------------ nodes

    def lease(
        self,
        want: int = 100,
        version: int | None = None,
        node: str = "n0",
        life: str = "a",
        versions: dict[str, int] | None = None,
        *,
        ask: str | None = None,
    ) -> list[TaskLease]:
        """`version` is of the first policy; the others are at their heads. `ask` is a request's attempt id."""
        self.asks += 1
        now = self.ledger.heads | (versions or {}) | ({} if version is None else {self.policy: version})
        attempt = f"ask{self.asks}" if ask is None else ask
        return self.ledger.lease_tasks(
            LeaseTasks(node=node, incarnation=life, want=want, versions=now, attempt=attempt)
        ).leases

    def beat(
        self, attempts: Sequence[str] = (), node: str = "n0", life: str = "a", version: int = 0, capacity: int = 8
    ) -> HeartbeatReply:
        versions = self.ledger.heads | {self.policy: version}
        return self.ledger.renew(
            Heartbeat(node=node, incarnation=life, attempts=list(attempts), versions=versions, capacity=capacity)
        )

    def done(
        self,
        lease: TaskLease,
        reward: float | None = None,
        version: int | None = None,
        samples: list[SampleMeta] | None = None,
        *,
        node: str = "n0",
        seconds: float = 0.5,
    ) -> Ack:
        return self.ledger.complete(self.news(lease, reward, version, samples, node=node, seconds=seconds))

    def news(
        self,
        lease: TaskLease,
        reward: float | None = None,
        version: int | None = None,
        samples: list[SampleMeta] | None = None,
        *,
        node: str = "n0",
        seconds: float = 0.5,
    ) -> CompleteTask:
        """Without `samples`, one of every policy, each in a row of its own; their reward is the episode's."""
        reward = float(lease.task.place) if reward is None else reward
        if samples is None:
            heads = self.ledger.heads | ({} if version is None else {self.policy: version})
            samples = [
                sample(head, policy=policy, row=self.row_of(lease.attempt, policy)) for policy, head in heads.items()
            ]
        if math.isfinite(reward):
            samples = [msgspec.structs.replace(found, reward=found.reward or reward) for found in samples]
        return CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=node,
            reward=reward,
            samples=samples,
            calls=1,
            seconds=seconds,
        )

    def fail(self, lease: TaskLease, cause: str = "timeout", node: str = "n0", error: str = "it hung") -> Ack:
        return self.ledger.fail(
            FailTask(task=lease.task.id, attempt=lease.attempt, node=node, cause=cause, error=error)
        )

    def play_all(self, node: str = "n0") -> int:
        """Play everything that can be leased; returns how many episodes that were."""
        played = 0
        while leases := self.lease(node=node):
            for lease in leases:
                self.done(lease, node=node)
                played += 1
        return played

    # ------------------------------------------------------------ units

    def unit(
        self, unit: str = UNIT, dropped: Sequence[int] = (), *, load: float = 0.0, writing: bool = False
    ) -> list[int]:
        """Send a unit's heartbeat, which reports the idle segments as closed, except those in `writing`."""
        info = UnitInfo(unit=unit, path=f"/units/{unit}", load=load)
        reply = self.ledger.unit_beat(UnitBeat(info=info, dropped=list(dropped)))
        if reply.idle and not writing:
            reply = self.ledger.unit_beat(UnitBeat(info=info, closed=reply.idle))
        return reply.drop

    def row(self, unit: str = UNIT, segment: int = 0) -> Row:
        """Return a row that was never used before."""
        self.rows += 1
        return Row(unit=unit, segment=segment, offset=8 * self.rows, length=8)

    def row_of(self, attempt: str, policy: str = POLICY) -> Row:
        """Return the row of an attempt's sample; the same at every call."""
        if (attempt, policy) not in self.rows_of:
            self.rows_of[attempt, policy] = self.row()
        return self.rows_of[attempt, policy]

    def lose(self, *rows: Row) -> Ack:
        return self.ledger.lose_rows(LoseRows(rows=list(rows), reason="checksum"))

    def segment(self, segment: int = 0, unit: str = UNIT) -> tuple[int, str]:
        row = self.ledger.db.one("SELECT live, state FROM segments WHERE unit = ? AND segment = ?", (unit, segment))
        assert row is not None
        return row["live"], row["state"]

    # ------------------------------------------------------------ trainers and stages

    def join(self, checkpoint: int = 0, published: int = 0, policy: str | None = None) -> TrainerJoined:
        self.incarnations += 1
        policy = policy or self.policy
        self.lives[policy] = f"i{self.incarnations}"
        if policy == self.policy:
            self.incarnation = self.lives[policy]
        return self.ledger.join_trainer(
            JoinTrainer(policy=policy, incarnation=self.lives[policy], checkpoint=checkpoint, published=published)
        )

    def _incarnation(self, policy: str) -> str:
        return self.incarnation if policy == self.policy else self.lives[policy]

    def ask(
        self, attempt: str | None = None, groups: int | None = None, policy: str | None = None, **more: int
    ) -> BatchReply:
        if attempt is None:
            self.attempts += 1
            attempt = f"a{self.attempts}"
        policy = policy or self.policy
        return self.ledger.lease_batch(
            LeaseBatch(
                policy=policy,
                incarnation=self._incarnation(policy),
                attempt=attempt,
                groups=groups or self.rules.policies[policy].batch_groups,
                version=self.ledger.lineage.head(policy),
                wait=0,
                **more,
            )
        )

    def batch(self, groups: int | None = None, policy: str | None = None) -> Batch:
        reply = self.ask(groups=groups, policy=policy)
        assert reply.batch is not None, reply.waiting_for
        return reply.batch

    def commit(self, batch: Batch, version: int | None = None, restorable: int = 0) -> Ack:
        policy = batch.policy
        return self.ledger.commit_batch(
            CommitBatch(
                policy=policy,
                incarnation=self._incarnation(policy),
                batch=batch.id,
                attempt=batch.attempt,
                version=self.ledger.lineage.highest(policy) + 1 if version is None else version,
                metrics={"loss": 0.5},
                step_seconds=1.0,
                wait_seconds=3.0,
                restorable=restorable,
            )
        )

    def step(self, policy: str | None = None, restorable: int = 0) -> Batch:
        self.play_all()
        batch = self.batch(policy=policy)
        self.commit(batch, restorable=restorable)
        return batch

    def ask_stage(self, stage: str, attempt: str, groups: int = 100, policy: str | None = None) -> Batch | None:
        ask = LeaseStage(policy=policy or self.policy, stage=stage, attempt=attempt, groups=groups, wait=0)
        return self.ledger.lease_stage(ask).batch

    def commit_stage(self, batch: Batch, stage: str, row: Row | None = None) -> Ack:
        columns = [SampleColumns(sample=entry.id, row=row or self.row()) for entry in batch.samples]
        return self.ledger.commit_stage(
            CommitStage(policy=batch.policy, stage=stage, batch=batch.id, attempt=batch.attempt, columns=columns)
        )

    # ------------------------------------------------------------ looking

    def group(self, group: str) -> tuple[str, str]:
        """The state and cause of the group; where it is open, of its only share."""
        row = self.ledger.db.one("SELECT state, cause FROM groups WHERE id = ?", (group,))
        assert row is not None
        if row["state"] == "open":
            (row,) = self.ledger.db.all("SELECT state, cause FROM shares WHERE grp = ?", (group,))
        return row["state"], row["cause"]

    def share(self, group: str, producer: str, stream: str | None = None) -> tuple[str, str]:
        row = self.ledger.db.one(
            "SELECT state, cause FROM shares WHERE grp = ? AND producer = ? AND stream = ?",
            (group, producer, stream or producer),
        )
        return ("none", "") if row is None else (row["state"], row["cause"])

    def task(self, task: str) -> str:
        return str(self.ledger.db.value("SELECT state FROM tasks WHERE id = ?", (task,)))
