"""The ledger: every prompt's way from admission to its one end, in one SQLite file.

A plain synchronous class: transitions are applied when they are called and durable after `commit()`; the service
answers its callers only then. It never looks at the real time or at another process. Opening the file again, after
kill -9 too, gives exactly the committed state; live leases get a fresh grace period.

Phases: training -> finishing (enough steps, or no prompts left: the final evaluation) -> ended. A run that was
stopped keeps what is outstanding, so that it can be resumed; a run that is done has nothing outstanding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rillflow.contracts import Clock, PromptSource, SystemClock
from rillflow.dataflow.batches import Batches
from rillflow.dataflow.database import Database
from rillflow.dataflow.evaluations import Evaluations
from rillflow.dataflow.groups import Groups
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base
from rillflow.dataflow.rules import Rules
from rillflow.dataflow.tables import FORMAT, NEWEST
from rillflow.dataflow.tasks import Tasks
from rillflow.errors import DataError, LeaseLost, RillflowError
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
    Lane,
    LeaseBatch,
    LeaseTasks,
    Phase,
    TaskLeases,
    TrainerJoined,
)

DONE, OUT_OF_PROMPTS, TOO_MANY_FAILURES = "done", "out of prompts", "too many failures"
_MOST_TASKS = 1024
_MOST_SKIPPED = 1000  # positions that one call of `admit` passes over, so that a strict curator blocks nobody
_FLAT_AFTER = 5  # batches' worth of groups without a step before it is said that they tell nothing apart


class Ledger:
    def __init__(
        self,
        path: Path,
        rules: Rules,
        source: PromptSource,
        heldout: PromptSource | None = None,
        *,
        hooks: Hooks | None = None,
        clock: Clock | None = None,
        resume: bool = False,
    ) -> None:
        self.rules = rules
        self.on_abandon: Callable[[RillflowError], None] = lambda error: None
        self.db = Database(path)
        self.db.on_abandon = self._abandoned
        self._clock = clock or SystemClock()
        self._hooks = hooks or Hooks()
        self._source = source
        self._heldout = heldout
        sources: dict[Lane, PromptSource] = {"train": source}
        if heldout is not None:
            sources["eval"] = heldout
        base = Base(self.db, rules, self._clock)
        self.groups = Groups(base, self._hooks, sources)
        self.lineage = Lineage(base)
        self.nodes = Nodes(base)
        self.tasks = Tasks(base, self.groups, self.lineage, self.nodes)
        self.batches = Batches(base, self.groups, self.lineage, self.nodes, self._hooks)
        self.evaluations = Evaluations(base, self.groups, self.lineage, heldout.length if heldout else 0)
        try:
            self._open(resume)
        except BaseException:
            self.db.close()
            raise

    def _open(self, resume: bool) -> None:
        with self.db.change():
            self._check_sources()
            self.db.set_meta("format", FORMAT)
            # A resumed run may have another bound; the audit holds every batch to the widest.
            self.db.set_meta("staleness", max(self.rules.staleness, self.db.meta("staleness", 0)))
            self.lineage.open()
            self.grace()
            self._reopen(resume)
        self._restore_hooks()
        self.commit()

    def grace(self) -> None:
        """Nobody was heard, or the clock was set: live leases and nodes get their full time again."""
        with self.db.change():
            self.nodes.grace()
            self.tasks.grace()
            self.batches.grace()

    def _check_sources(self) -> None:
        now = [self._source.length, self._heldout.length if self._heldout else 0]
        before = self.db.meta("prompts", now)
        if before != now:
            raise DataError(
                f"the run was started with {before[0]} prompts and {before[1]} held out; now there are {now[0]} and "
                f"{now[1]}",
                "restore the prompts that the run was started with",
            )
        self.db.set_meta("prompts", now)

    def _restore_hooks(self) -> None:
        self._hooks.restore({row["name"]: row["state"] for row in self.db.all("SELECT * FROM hooks")})

    # ------------------------------------------------------------ durability

    @property
    def dirty(self) -> bool:
        """Whether something was changed that is not durable yet."""
        return self.db.dirty

    def commit(self) -> None:
        """Make every transition so far durable; DiskFull when it cannot, and then none of them has happened."""
        if self.dirty and self._hooks.curators:
            with self.db.change():
                for name, state in self._hooks.states().items():
                    self.db.run("INSERT OR REPLACE INTO hooks VALUES (?, ?)", (name, state))
        self.db.commit()

    def _abandoned(self, error: RillflowError) -> None:
        """The open transaction was taken back; the hooks go back to what was saved with the last one."""
        try:
            self._restore_hooks()
        finally:
            self.on_abandon(error)

    def close(self) -> None:
        try:
            self.commit()
        finally:
            self.db.close()

    # ------------------------------------------------------------ phases

    @property
    def phase(self) -> Phase:
        phase: Phase = self.db.meta("phase", "training")
        return phase

    @property
    def reason(self) -> str:
        """Why the run is finishing or has ended."""
        return str(self.db.meta("reason", ""))

    def _enter(self, phase: Phase, reason: str) -> None:
        self.db.set_meta("phase", phase)
        self.db.set_meta("reason", reason)

    def _reopen(self, resume: bool) -> None:
        """A run that was to do more steps goes on; one that was stopped only when it is resumed."""
        if self.phase == "training":
            return
        more = self.reason == DONE and self.lineage.steps < self.rules.total_steps
        if more or (resume and self.reason not in (DONE, OUT_OF_PROMPTS)):
            self.db.clear_counter("failures_in_a_row")
            self._enter("training", "")

    def stop(self, reason: str) -> None:
        """End the run now. Leases of tasks return; the batch in work may still be committed."""
        with self.db.change():
            if self.phase != "ended":
                self.tasks.give_all_back("stopped")
                self._enter("ended", reason)

    @property
    def exhausted(self) -> bool:
        """Whether all epochs have been admitted."""
        epochs = self.rules.epochs
        return epochs is not None and self.db.counter("cursor") >= epochs * self._source.length

    def advance(self) -> None:
        """Everything that follows from the present state: evaluations, admission, the end of the run."""
        with self.db.change():
            self.evaluations.close()
            if self.phase == "training":
                self._train_on()
            if self.phase == "finishing" and not self.evaluations.running:
                self._enter("ended", self.reason)

    def _train_on(self) -> None:
        if self.db.counter("failures_in_a_row") >= self.rules.max_failures:
            self.stop(f"{TOO_MANY_FAILURES}: {self.db.meta('last_failure', '')}")
        elif self.lineage.steps >= self.rules.total_steps:
            self._finish(DONE)
        elif self.exhausted and self.groups.outstanding == 0:
            self._finish(OUT_OF_PROMPTS)
        else:
            self.evaluations.schedule(final=False)
            self.admit()

    def _finish(self, reason: str) -> None:
        self.batches.release_all("run_ended")
        for row in self.db.all(
            "SELECT id FROM groups WHERE lane = 'train' AND state IN ('playing', 'ready') ORDER BY ord"
        ):
            self.groups.end(row["id"], "expired", "run_ended")
        self._enter("finishing", reason)
        self.evaluations.schedule(final=True)

    def admit(self) -> int:
        """Admit prompts while none of them can pass the staleness bound; returns how many were."""
        admitted = skipped = 0
        with self.db.change():
            while self._open_for_more() and skipped < _MOST_SKIPPED:
                index = self.db.counter("cursor")
                self.db.count("cursor")
                if self._hooks.admits(self._source.at(index)):
                    self.groups.create("train", index, size=self.rules.group_size)
                    admitted += 1
                else:
                    self.db.count("skipped")
                    skipped += 1
        return admitted

    def _open_for_more(self) -> bool:
        return not self.exhausted and self.groups.outstanding < self.rules.window

    # ------------------------------------------------------------ nodes and tasks

    @property
    def heads(self) -> dict[str, int]:
        return {self.rules.policy: self.lineage.head}

    def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        with self.db.change():
            if self.nodes.retired(ask.node, ask.incarnation):
                raise LeaseLost(f"another process has taken the name of node {ask.node}", "end this one")
            self._hear(ask.node, ask.incarnation, ask.versions)
            version = ask.versions.get(self.rules.policy)
            want = min(ask.want, _MOST_TASKS)
            if version is None or want < 1 or self.phase == "ended":
                return TaskLeases(leases=[], heads=self.heads, phase=self.phase)
            leases = self.tasks.lease(ask.node, version, want)
            return TaskLeases(leases=leases, heads=self.heads, phase=self.phase)

    def renew(self, beat: Heartbeat) -> HeartbeatReply:
        with self.db.change():
            if self.nodes.retired(beat.node, beat.incarnation):
                lost = beat.attempts
            else:
                self._hear(beat.node, beat.incarnation, beat.versions)
                self.nodes.describe(beat.node, beat.capacity, beat.stats)
                lost = self.tasks.renew(beat.node, beat.attempts)
            return HeartbeatReply(lost=lost, heads=self.heads, phase=self.phase)

    def _hear(self, node: str, incarnation: str, versions: dict[str, int]) -> None:
        if self.nodes.hear(node, incarnation, versions):
            self.tasks.lose_node(node, "node_restarted")
            self.advance()

    def complete(self, news: CompleteTask) -> Ack:
        with self.db.change():
            moves = self.groups.moves
            ack = self.tasks.complete(news)
            if self.groups.moves != moves:  # most completions end no group: nothing follows from them
                self.advance()
            return ack

    def fail(self, news: FailTask) -> Ack:
        with self.db.change():
            ack = self.tasks.fail(news)
            self.advance()
            return ack

    def expire(self) -> None:
        """Return what was leased for too long or to nodes that are gone, and see what follows."""
        with self.db.change():
            for node in self.nodes.silent():
                self.tasks.lose_node(node, "node_gone")
            self.tasks.expire()
            self.batches.expire()
            self.advance()

    # ------------------------------------------------------------ the trainer

    def lease_batch(self, ask: LeaseBatch) -> BatchReply:
        with self.db.change():
            self.lineage.check_trainer(ask.policy, ask.incarnation)
            batch = self.batches.held(ask) or self._new_batch(ask)
            waiting_for = "" if batch else self.waiting_for(ask.groups)
            return BatchReply(batch=batch, phase=self.phase, waiting_for=waiting_for)

    def _new_batch(self, ask: LeaseBatch) -> Batch | None:
        self.batches.check(ask)
        if self.phase != "training" or (self.rules.on_policy and self.evaluations.running):
            return None
        last = self.exhausted and self.groups.count("train", "playing") == 0
        return self.batches.lease(ask, last=last)

    def why_no_tasks(self, version: int | None) -> str:
        """What a node on `version` that gets no task waits for."""
        head, bound = self.lineage.head, self.rules.staleness
        if version is None or self.lineage.died(version, version):
            return f"weights: it serves no live version of {self.rules.policy}"
        if head - version > bound:
            return f"weights: it is at version {version}, the trainer at {head}, and the bound is {bound}"
        if self.tasks.pending:
            return "weights: the pending tasks need a newer version, or another node"
        outstanding, window = self.groups.outstanding, self.rules.window
        return f"tasks: none is pending, {outstanding} of at most {window} groups are outstanding"

    def waiting_for(self, groups: int) -> str:
        """What a trainer that wants `groups` groups waits for."""
        if self.phase != "training":
            return f"nothing: the run is {self.phase} ({self.reason})"
        if self.rules.on_policy and (evaluation := self.evaluations.waiting_for()):
            return evaluation
        ready = self.groups.count("train", "ready")
        running, nodes = self.tasks.running, self.nodes.healthy
        return f"{ready} of {groups} groups ready, {running} tasks running, {nodes} nodes{self._flat(groups)}"

    def _flat(self, groups: int) -> str:
        """Where group after group has nothing to tell apart, a batch may never fill: say so."""
        row = self.db.one("SELECT count(*) AS complete, total(flat) AS flat FROM recent")
        if row is None or row["complete"] < _FLAT_AFTER * groups or row["flat"] < 0.8 * row["complete"]:
            return ""
        return f"; {row['flat']:.0f} of the last {row['complete']} groups had equal rewards: solved, or out of reach?"

    def commit_batch(self, news: CommitBatch) -> Ack:
        with self.db.change():
            self.lineage.check_trainer(news.policy, news.incarnation)
            if self.batches.commit(news):
                self._hooks.on_version(news.version)
                self.batches.refuse_stale()
                self.advance()
            return Ack(accepted=True)

    def join_trainer(self, ask: JoinTrainer) -> TrainerJoined:
        """A trainer begins a new incarnation from a checkpoint: what came after it goes back to the stream."""
        with self.db.change():
            self.lineage.check_policy(ask.policy)
            if before := self.lineage.joined(ask):
                return before
            self.lineage.check_checkpoint(ask.checkpoint)
            orphaned, rolled_back = self._roll_back(ask)
            reply = TrainerJoined(
                version=ask.checkpoint,
                highest=self.lineage.highest,
                steps=self.lineage.steps,
                orphaned=orphaned,
                rolled_back=rolled_back,
            )
            self.lineage.remember(ask, reply)
            self.advance()
            return reply

    def _roll_back(self, ask: JoinTrainer) -> tuple[list[int], int]:
        self.batches.release_all("trainer_restarted")
        orphaned = self.lineage.rewind(ask.checkpoint, ask.published)
        rolled_back = self.batches.roll_back(ask.checkpoint)
        self.evaluations.orphan(ask.checkpoint)
        reran = self.groups.rerun_dead(ask.checkpoint, NEWEST)
        if orphaned:
            self._tell_rollback(ask.checkpoint, orphaned, rolled_back, reran)
        if orphaned and self.reason in (DONE, OUT_OF_PROMPTS):
            self._enter("training", "")
        return orphaned, rolled_back

    def _tell_rollback(self, version: int, orphaned: list[int], groups: int, tasks: int) -> None:
        self.db.event(
            {
                "event": "rollback",
                "version": version,
                "step": self.lineage.steps,
                "orphaned": orphaned,
                "groups": groups,
                "tasks": tasks,
                "time": self._clock.now(),
            }
        )

    def events_after(self, seq: int) -> list[tuple[int, dict[str, Any]]]:
        """The lines of `metrics.jsonl` after number `seq`."""
        rows = self.db.all("SELECT seq, line FROM events WHERE seq > ? ORDER BY seq", (seq,))
        numbers = [{"seq": row["seq"]} for row in rows]  # first in the line, and no metric of that name instead
        return [(row["seq"], n | json.loads(row["line"]) | n) for row, n in zip(rows, numbers, strict=True)]
