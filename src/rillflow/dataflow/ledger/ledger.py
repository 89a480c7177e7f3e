"""The ledger: every prompt's way from admission to its one end, in one SQLite file.

A plain synchronous class: transitions are applied when they are called and durable after `commit()`; the service
answers its callers only then. It never looks at the real time or at another process. Opening the file again, after
kill -9 too, gives exactly the committed state; live leases get a fresh grace period.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rillflow.contracts import Clock, PromptSource, SystemClock
from rillflow.dataflow.group_rewards import UnscoredGroup
from rillflow.dataflow.hooks.running import Beside, Hooks
from rillflow.dataflow.ledger.course import Parts
from rillflow.dataflow.ledger.database import Base, Database
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.ledger.tables import NEWEST
from rillflow.dataflow.rules import Rules
from rillflow.errors import BadRequest, DataError, LeaseLost, RillflowError
from rillflow.types import (
    Ack,
    BatchReply,
    CommitBatch,
    CommitStage,
    Committed,
    CompleteTask,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    LeaveRun,
    LoseRows,
    Phase,
    RenewBatch,
    RetireNode,
    Scored,
    TaskLeases,
    TrainerJoined,
    UnitBeat,
    UnitBeatReply,
    Units,
    UserError,
)

_MOST_TASKS = 1024
_LONGEST_ATTEMPT = 200


class Ledger(Parts):
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
        try:
            super().__init__(Base(self.db, rules, self._clock), self._hooks, source, heldout)
            self._open(resume)
        except BaseException:
            self.db.close()
            raise

    def _open(self, resume: bool) -> None:
        with self.db.change():
            self._check_sources()
            self.db.set_meta("format", FORMAT)
            self._widen_bounds()
            self.lineage.open()
            self.stages.open()
            self.batches.open()
            self.balances.open()
            self.grace()
            self.course.reopen(resume)
            self.scoring.open()
        self._restore_hooks()
        self.commit()

    def _widen_bounds(self) -> None:
        """A resumed run may have other bounds; the audit holds every batch to the widest."""
        bounds = self.db.meta("staleness", {})
        for name, policy in self.rules.policies.items():
            bounds[name] = max(policy.staleness, bounds.get(name, 0))
        self.db.set_meta("staleness", bounds)
        if (replayer := self._hooks.replayer) is not None:
            self.db.set_meta("replay_staleness", max(replayer.staleness, self.db.meta("replay_staleness", 0)))

    def grace(self) -> None:
        """Give live leases, nodes and units their full time again, after a pause or a change of the clock."""
        with self.db.change():
            for part in (self.nodes, self.storage, self.groups, self.tasks, self.batches, self.stages):
                part.grace()

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
        self._check_place()

    def _check_place(self) -> None:
        """Every ledger of a run has prompts, and they stay in it."""
        now = [self.rules.ledger, self.rules.ledgers]
        before = self.db.meta("ledger", now)
        if before != now:
            raise DataError(
                f"this is ledger {before[0]} of {before[1]}, and is opened as ledger {now[0]} of {now[1]}",
                "a run keeps the number of ledgers that it was started with (dataflow.ledgers)",
            )
        self.db.set_meta("ledger", now)
        if not any(self.rules.owns(self._source.at(index).id) for index in range(self._source.length)):
            raise DataError(
                f"none of the {self._source.length} prompts belongs to ledger {now[0]} of {now[1]}",
                "set dataflow.ledgers lower: prompts are divided by the hash of their ids",
            )

    def _restore_hooks(self) -> None:
        self._hooks.restore(tuple(row) for row in self.db.all("SELECT hook, key, value FROM hook_state"))

    def run_hooks_beside(self, seconds: float) -> Beside | None:
        """Run users' hooks beside the event loop, each call for so long: transitions may raise HookPending then."""
        return self._hooks.run_beside(seconds)

    # ------------------------------------------------------------ durability

    @property
    def dirty(self) -> bool:
        """True if a change is not in the log yet."""
        return self.db.dirty

    def commit(self) -> None:
        """Make every transition so far durable."""
        self.write()
        self.sync()

    def sync(self) -> None:
        """What was written is durable when this returns. May run in a thread of its own, one at a time."""
        self.db.sync()

    def write(self) -> None:
        """Every transition so far is in the log; DiskFull when it cannot, and then none of them has happened."""
        changes, errors = (self._hooks.changes(), self._hooks.errors.take()) if self.dirty else ([], [])
        if changes or errors:
            with self.db.change():
                self.user_errors.add(errors)
                self.db.many("INSERT OR REPLACE INTO hook_state VALUES (?, ?, ?)", changes)
        self.db.write()

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
        return self.course.phase

    @property
    def reason(self) -> str:
        """Why the run is finishing or has ended."""
        return self.course.reason

    @property
    def moves(self) -> int:
        """A number that is another one when a group or a share has changed its state."""
        return self.groups.moves + self.shares.moves

    def stop(self, reason: str) -> None:
        """End the run now. Leases of tasks return; the batch in work may still be committed."""
        with self.db.change():
            self.course.stop(reason)

    def advance(self) -> None:
        """Everything that follows from the present state: evaluations, admission, the end of the run."""
        with self.db.change():
            self.course.advance()

    def admit(self) -> int:
        """Admit prompts while none of them can pass the staleness bound; returns how many were."""
        with self.db.change():
            return self.course.admit()

    # ------------------------------------------------------------ nodes and tasks

    @property
    def heads(self) -> dict[str, int]:
        return self.lineage.heads

    def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        with self.db.change():
            if not 0 < len(ask.attempt) <= _LONGEST_ATTEMPT:
                raise BadRequest("an attempt id has 1 to 200 characters", "draw attempt ids at random")
            if self.nodes.retired(ask.node, ask.incarnation):
                raise LeaseLost(f"another process has taken the name of node {ask.node}", "end this one")
            self._hear(ask.node, ask.incarnation, ask.versions)
            want, phase = min(ask.want, _MOST_TASKS), self.phase
            if want < 1 or phase == "ended":
                return TaskLeases(leases=[], heads=self.heads, phase=phase)
            leases = self.leasing.repeat(ask.node, ask.attempt) or self.leasing.lease(
                ask.node, ask.versions, want, ask=ask.attempt, training=phase == "training"
            )
            return TaskLeases(leases=leases, heads=self.heads, phase=phase)

    def renew(self, beat: Heartbeat) -> HeartbeatReply:
        with self.db.change():
            if self.nodes.retired(beat.node, beat.incarnation):
                lost, leave = beat.attempts, self.nodes.leave_in(beat.node)
            else:
                self._hear(beat.node, beat.incarnation, beat.versions)
                leave = self.nodes.describe(beat)
                lost = self.tasks.renew(beat.node, beat.attempts)
            return HeartbeatReply(lost=lost, heads=self.heads, phase=self.phase, leave=leave)

    def retire(self, ask: RetireNode) -> Ack:
        """The node gets no more tasks; it hears with its next heartbeat when it has to be gone."""
        with self.db.change():
            self.nodes.retire(ask.node, ask.drain)
            self.tasks.clear_home(ask.node)
            return Ack(accepted=True)

    def leave(self, news: LeaveRun) -> Ack:
        """Let a node leave: its leases return at once, and no attempt is used up. A repeated call changes nothing."""
        with self.db.change():
            if not self.nodes.retired(news.node, news.incarnation):
                self._hear(news.node, news.incarnation, {})
                self._leave(news.node, news.incarnation)
            return Ack(accepted=True)

    def _leave(self, node: str, incarnation: str) -> None:
        self.tasks.return_node(node, "node_left")
        self.nodes.leave(node, incarnation)
        self.advance()

    def _hear(self, node: str, incarnation: str, versions: dict[str, int]) -> None:
        if self.nodes.hear(node, incarnation, versions):
            self.groups.settle_all(self.tasks.lose_node(node, "node_restarted"))
            self.advance()

    def why_no_tasks(self, node: str, versions: dict[str, int]) -> str:
        """Describe what a node on these versions waits for when it gets no task."""
        return self.leasing.why_none(node, versions, training=self.phase == "training")

    def complete(self, news: CompleteTask) -> Ack:
        (taken,) = self.complete_many([news])
        if isinstance(taken, RillflowError):
            raise taken
        return taken

    def complete_many(self, news: Sequence[CompleteTask]) -> list[Ack | RillflowError]:
        """Take or refuse each completion on its own. A refused one changes nothing."""
        try:
            with self.db.change():
                moves = self.moves
                taken = self.tasks.complete(news)
                self.groups.settle_all(taken.groups)
                if self.moves != moves:  # most completions end no group: nothing follows from them
                    self.advance()
                return taken.answers
        except BadRequest as error:  # the database refused one of them, and with it all
            if len(news) == 1:
                return [error]
            return [answer for one in news for answer in self.complete_many([one])]

    def fail(self, news: FailTask) -> Ack:
        with self.db.change():
            ack, ended = self.tasks.fail(news)
            self.groups.settle_all(ended)
            self.advance()
            return ack

    def score_group(self, group: UnscoredGroup, rewards: Sequence[Scored]) -> bool:
        """The group's reward says this of its episodes; False where one of them was played again since."""
        with self.db.change():
            scored = self.scoring.score(group, rewards)
            self.advance()
            return scored

    def fail_group(self, group: UnscoredGroup, error: str) -> bool:
        """The group's reward could not be computed; False where one of its episodes was played again since."""
        with self.db.change():
            failed = self.scoring.fail(group, error)
            self.advance()
            return failed

    def note_errors(self, errors: Sequence[UserError]) -> None:
        """User code that runs beside the ledger has raised these."""
        with self.db.change():
            self.user_errors.add(errors)

    def expire(self) -> None:
        """Return what was leased for too long or to nodes that are gone, and see what follows."""
        with self.db.change():
            for node in self.nodes.silent():
                self.groups.settle_all(self.tasks.lose_node(node, "node_gone"))
            for node, incarnation in self.nodes.overdue():
                self._leave(node, incarnation)
            self.nodes.sum_up()
            for unit in self.storage.silent():
                self.lost_rows.lose_unit(unit)
            self.groups.settle_all(self.tasks.expire())
            self.batches.expire()
            self.stages.expire()
            if self.phase != "ended":  # a run that was stopped keeps what is outstanding
                self.groups.close_late()
            self.advance()

    # ------------------------------------------------------------ storage units

    def unit_beat(self, beat: UnitBeat) -> UnitBeatReply:
        with self.db.change():
            self.storage.hear(beat.info)
            unit = beat.info.unit
            self.storage.dropped(unit, beat.dropped)
            self.storage.closed(unit, beat.closed)
            self.storage.found(unit, beat.found)
            return UnitBeatReply(drop=self.storage.dropping(unit), idle=self.storage.idle(unit))

    def units(self) -> Units:
        return Units(units=self.storage.healthy())

    def lose_rows(self, news: LoseRows) -> Ack:
        """Rows that could not be read as they were written: their episodes are played again."""
        with self.db.change():
            self.lost_rows.lose_rows(news.rows, news.reason[:1000])
            self.advance()
            return Ack(accepted=True)

    # ------------------------------------------------------------ trainers and stages

    def lease_batch(self, ask: LeaseBatch) -> BatchReply:
        with self.db.change():
            self.lineage.check_trainer(ask.policy, ask.incarnation)
            if ask.spent:
                self.course.run_out()
            grows, last = self.course.serves(ask.policy), self.course.last(ask.policy)
            batch = self.batches.serve(ask, may_grow=grows, last=last)
            waiting_for = "" if batch else self.waiting_for(ask.policy, ask.groups)
            spent = batch is None and self.rules.ledgers > 1 and self.course.spent
            return BatchReply(batch=batch, phase=self.phase, waiting_for=waiting_for, spent=spent)

    def renew_batch(self, ask: RenewBatch) -> Ack:
        """The holder of a batch, or of a stage's, still works on it; LeaseLost when it is no longer the holder."""
        with self.db.change():
            if not self.batches.renew(ask) and not self.stages.renew(ask):
                raise LeaseLost(f"batch {ask.batch!r:.80} is not held by this attempt", "ask under a new attempt id")
            return Ack(accepted=True)

    def lease_stage(self, ask: LeaseStage) -> BatchReply:
        with self.db.change():
            self.stages.check(ask.policy, ask.stage)
            batch = self.stages.serve(ask, may_open=self.phase == "training")
            waiting_for = "" if batch else f"no group is ready for stage {ask.stage} of {ask.policy}"
            return BatchReply(batch=batch, phase=self.phase, waiting_for=waiting_for)

    def commit_stage(self, news: CommitStage) -> Ack:
        with self.db.change():
            self.stages.check(news.policy, news.stage)
            return self.stages.commit(news)

    def waiting_for(self, policy: str, groups: int) -> str:
        """Describe what the policy's trainer waits for when it asks for `groups` groups."""
        return self.course.waiting_for(policy, groups)

    def commit_batch(self, news: CommitBatch) -> Committed:
        with self.db.change():
            self.lineage.check_trainer(news.policy, news.incarnation)
            if self.batches.commit(news):
                if news.policy == self.rules.policy:
                    self._hooks.on_version(news.version)
                for stream in self.rules.streams_of(news.policy):
                    self.streams.refuse_stale(stream, between_steps=stream == news.policy)
                self.balances.after_commit(news.policy, [part.balance for part in news.parts if part.balance])
                self.advance()
            part = self.steps.told(news.version) if self.rules.ledger else None
            return Committed(accepted=True, part=part and replace(part, balance=self.balances.latest()))

    def join_trainer(self, ask: JoinTrainer) -> TrainerJoined:
        """Begin a new incarnation of a trainer from a checkpoint. Batches committed after it return to the stream."""
        with self.db.change():
            self.lineage.check_policy(ask.policy)
            if before := self.lineage.joined(ask):
                return before
            self.lineage.check_checkpoint(ask.policy, ask.checkpoint)
            orphaned, rolled_back = self.course.roll_back(ask)
            reply = TrainerJoined(
                version=ask.checkpoint,
                highest=self.lineage.highest(ask.policy),
                steps=self.lineage.steps(ask.policy),
                orphaned=orphaned,
                rolled_back=rolled_back,
            )
            self.lineage.remember(ask, reply)
            self.advance()
            return reply

    @property
    def last_event(self) -> int:
        return self.db.last_event

    def events_after(self, seq: int, until: int = NEWEST) -> list[tuple[int, dict[str, Any]]]:
        """The lines of `metrics.jsonl` after number `seq`."""
        rows = self.db.all("SELECT seq, line FROM events WHERE seq > ? AND seq <= ? ORDER BY seq", (seq, until))
        # The number is first in the line, and no metric of that name is instead.
        return [(number, {"seq": number} | json.loads(line) | {"seq": number}) for number, line in rows]
