"""The course of a run: its phases, admission of prompts, and its end. `Parts` makes the parts of a ledger for it.

Phases: training -> finishing (enough steps of all policies, or no prompts left: the final evaluation) -> ended. A run
that was stopped keeps what is outstanding, so that it can be resumed; a run that is done has nothing outstanding.

A run that reaches its target is finishing, too: it leases no batch and plays no evaluation any more, and ends when the
batches that trainers work on have been committed or given back. It never ends with a step half done.

One of several ledgers that has no prompts left trains on, with nothing, until none of them has any: a trainer reports
it.
"""

from __future__ import annotations

from rillflow.contracts import PromptSource
from rillflow.dataflow.balance_ledger import Balances
from rillflow.dataflow.group_rewards import Scoring
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.kept_episodes import KeptEpisodes
from rillflow.dataflow.ledger.attempts import Attempts
from rillflow.dataflow.ledger.batches import Batches
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.evaluations import Evaluations
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.leasing import Leasing
from rillflow.dataflow.ledger.nodes import Nodes, UserErrors
from rillflow.dataflow.ledger.payload import LostRows, Samples, Storage
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.shares import Shares
from rillflow.dataflow.ledger.stages import Stages
from rillflow.dataflow.ledger.steps import Steps
from rillflow.dataflow.ledger.streams import ELSEWHERE, SKIPPED_IN_A_ROW, Streams
from rillflow.dataflow.ledger.tables import NEWEST, Share
from rillflow.dataflow.ledger.tasks import FAILURES_IN_A_ROW, Tasks
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import DONE, GOOD_ENDS, OUT_OF_PROMPTS, TARGET_REACHED, JoinTrainer, Lane, Phase

TOO_MANY_FAILURES = "too many failures"
_MOST_SKIPPED = 1000  # positions that one call of `admit` passes over: a strict curator blocks nothing
_SHOWN, _SHOWN_REWARDS = 200, 3  # characters of an error; most frequent rewards
_FLAT_AFTER = 5  # batches' worth of groups without a step before it is said that they tell nothing apart


class Course(Part):
    def __init__(self, base: Base, hooks: Hooks, source: PromptSource, parts: Parts) -> None:
        super().__init__(base)
        self._hooks = hooks
        self._source = source
        self._parts = parts

    @property
    def phase(self) -> Phase:
        phase: Phase = self._db.meta("phase", "training")
        return phase

    @property
    def reason(self) -> str:
        return str(self._db.meta("reason", ""))

    def _enter(self, phase: Phase, reason: str) -> None:
        self._db.set_meta("phase", phase)
        self._db.set_meta("reason", reason)

    def reopen(self, resume: bool) -> None:
        """Go on where the run was given more steps, more prompts or a higher target; one that was stopped goes on only
        when it is resumed."""
        if self.phase == "training":
            return
        more = {
            DONE: bool(self._parts.lineage.unfinished()),
            OUT_OF_PROMPTS: not self.exhausted,
            TARGET_REACHED: not self._parts.evaluations.reached,
        }
        if more.get(self.reason) or (resume and self.reason not in GOOD_ENDS):
            self._db.clear_counter(FAILURES_IN_A_ROW)
            self._enter("training", "")

    def go_on(self) -> None:
        """A rollback took steps back: a run that had ended with them has not. One that had reached its target before
        them needs none of what came back."""
        if self.reason not in GOOD_ENDS:
            return
        if self._parts.evaluations.reached:
            self._finish(TARGET_REACHED)
        else:
            self._enter("training", "")

    def roll_back(self, ask: JoinTrainer) -> tuple[list[int], int]:
        """Go back to a trainer's checkpoint; return the versions that died and how many groups returned to the
        stream."""
        parts = self._parts
        parts.batches.release_all("trainer_restarted", ask.policy)
        orphaned = parts.lineage.rewind(ask.policy, ask.checkpoint, ask.published)
        rolled_back = parts.batches.roll_back(ask.policy, ask.checkpoint)
        parts.evaluations.orphan(ask.policy, ask.checkpoint)
        reran = parts.groups.rerun_dead(ask.policy, ask.checkpoint, NEWEST)
        if orphaned:
            self._tell_rollback(ask, orphaned, rolled_back, reran)
            self.go_on()
        return orphaned, rolled_back

    def _tell_rollback(self, ask: JoinTrainer, orphaned: list[int], groups: int, tasks: int) -> None:
        self._db.event(
            {
                "event": "rollback",
                "policy": ask.policy,
                "version": ask.checkpoint,
                "step": self._parts.lineage.steps(ask.policy),
                "orphaned": orphaned,
                "groups": groups,
                "tasks": tasks,
                "time": self._clock.now(),
            }
        )

    def stop(self, reason: str) -> None:
        if self.phase != "ended":
            self._parts.tasks.return_all("stopped")
            self._enter("ended", reason)

    # ------------------------------------------------------------ what follows

    def advance(self) -> None:
        self._parts.evaluations.close()
        phase = self.phase
        if phase == "training":
            phase = self._train_on()
        if phase == "finishing":
            self._end_finished()

    def _end_finished(self) -> None:
        """End a finishing run once nothing is at work for it. The last evaluation may have reached the target."""
        if self.reason != TARGET_REACHED and self._parts.evaluations.reached:
            self._finish(TARGET_REACHED)
        self._expire_the_rest()
        if not self._parts.evaluations.running and not self._parts.batches.any_leased:
            self._enter("ended", self.reason)

    def _train_on(self) -> Phase:
        if self._db.counter(FAILURES_IN_A_ROW) >= self._rules.max_failures:
            self.stop(f"{TOO_MANY_FAILURES}: {self._db.meta('last_failure', '')}")
        elif self._parts.evaluations.reached:
            self._finish(TARGET_REACHED)
        elif not self._parts.lineage.unfinished():
            self._finish(DONE)
        elif self.spent and self._rules.ledgers == 1:
            self._finish(OUT_OF_PROMPTS)
        else:
            self._parts.streams.trim()
            self._parts.evaluations.schedule(final=False)
            self.admit()
            return "training"
        return self.phase

    def run_out(self) -> None:
        """No ledger of the run has anything left, as a trainer says."""
        if self.phase == "training" and self.spent:
            self._finish(OUT_OF_PROMPTS)
            self.advance()

    def _finish(self, reason: str) -> None:
        """Train no further: play the final evaluation, or none where the target has been reached."""
        self._enter("finishing", reason)
        if reason == TARGET_REACHED:
            self._parts.batches.release_incomplete("run_ended")
            self._parts.evaluations.cancel()
        else:
            self._parts.batches.release_all("run_ended")
            self._parts.evaluations.schedule(final=True)
        self._expire_the_rest()

    def _expire_the_rest(self) -> None:
        """Expire what no trainer will take any more; a batch that was given back makes some of it."""
        groups = self._parts.groups
        for group in self._db.column("SELECT id FROM groups WHERE lane = 'train' AND state = 'playing' ORDER BY ord"):
            groups.end(group, "expired", "run_ended")
        query = f"SELECT {Share.columns()} FROM shares WHERE state = 'ready' ORDER BY ord"
        for share in self._db.rows(Share, query):
            groups.expire(share, "run_ended")

    @property
    def exhausted(self) -> bool:
        """True once all epochs have been admitted."""
        return self._db.counter("cursor") >= self._end

    @property
    def spent(self) -> bool:
        """True once all epochs have been admitted and all their groups have ended."""
        return self.exhausted and self._parts.groups.outstanding == 0

    @property
    def _end(self) -> int:
        """The position after the last epoch's last prompt."""
        return NEWEST if self._rules.epochs is None else self._rules.epochs * self._source.length

    def admit(self) -> int:
        room, skipped, elsewhere = self._parts.streams.room(), 0, 0
        if room < 1:
            return 0
        admitted: list[int] = []
        for index in range(self._db.counter("cursor"), self._end):
            if len(admitted) == room or skipped + elsewhere == _MOST_SKIPPED:
                break
            prompt = self._source.at(index)
            if not self._rules.owns(prompt.id):
                elsewhere += 1
                continue
            wanted = self._hooks.admits(prompt, index)
            if wanted is None:
                break
            if wanted:
                admitted.append(index)
            else:
                skipped += 1
        self._db.count("cursor", len(admitted) + skipped + elsewhere)
        self._db.count("skipped", skipped)
        self._db.count(SKIPPED_IN_A_ROW, skipped)
        self._db.count(ELSEWHERE, elsewhere)
        if admitted:
            self._parts.groups.create("train", admitted, size=self._rules.group_size)
            self._db.clear_counter(SKIPPED_IN_A_ROW)
        return len(admitted)

    # ------------------------------------------------------------ serving

    def serves(self, stream: str) -> bool:
        """Return whether the stream's trainer may get shares now."""
        waits = self._rules.policies[stream].on_policy and self._parts.evaluations.running
        return self.phase == "training" and not waits and not self._parts.lineage.done(stream)

    def last(self, stream: str) -> bool:
        """Return whether no more shares will become ready for the stream's trainer."""
        return (
            self.exhausted
            and self._parts.groups.count("train", "playing") == 0
            and self._parts.streams.in_stages(stream) == 0
        )

    def waiting_for(self, policy: str, groups: int) -> str:
        if self.phase != "training":
            return f"nothing: the run is {self.phase} ({self.reason})"
        if self._parts.lineage.done(policy):
            return f"nothing: {policy} has done its steps"
        if self._rules.policies[policy].on_policy and (evaluation := self._parts.evaluations.waiting_for()):
            return evaluation
        ready, behind = self._parts.streams.servable(policy), self._parts.streams.behind(policy)
        stages = "".join(f", stage {stage}: {groups} groups behind" for stage, groups in behind.items())
        stages += f", {scoring} waiting for their group's reward" if (scoring := self._parts.scoring.count) else ""
        running, nodes = self._parts.tasks.running, self._parts.nodes.healthy
        at_work = f"{_counted(running, 'task')} running, {_counted(nodes, 'node')}"
        return (
            f"{ready} of {groups} groups ready{stages}, {at_work}"
            f"{self._flat(policy, groups)}{self._parts.streams.skipping()}{self._failing()}"
        )

    def _failing(self) -> str:
        """Describe the latest failure, if the last episodes have all failed."""
        failed = self._db.counter(FAILURES_IN_A_ROW)
        if not failed:
            return ""
        error = " ".join(str(self._db.meta("last_failure", "")).split())
        return f"; the last {failed} episodes failed, the latest with {error[:_SHOWN]}"

    def _flat(self, policy: str, groups: int) -> str:
        """Describe the rewards since the last step if most groups had equal ones: then a batch may never fill."""
        query = "SELECT count(*), total(flat), min(at) FROM recent WHERE stream = ?"
        complete, flat, since = self._db.one(query, (policy,))
        if complete < _FLAT_AFTER * groups or flat < 0.8 * complete:
            return ""
        same = self._db.all(
            "SELECT reward, count(*) AS n, sum(rewards) FROM recent WHERE stream = ? AND flat "
            "GROUP BY reward ORDER BY n DESC, reward LIMIT ?",
            (policy, _SHOWN_REWARDS),
        )
        window = f"of the last {max(self._clock.now() - since, 0.0):.0f} s"
        reward, number, rewards = same[0]
        if number == complete:
            return f"; all {rewards} rewards {window} were {round(reward, 4)} ({number} groups)"
        seen = ", ".join(f"{n} with {round(value, 4)}" for value, n, _ in same)
        return f"; {flat:.0f} of {complete} groups {window} had equal rewards: {seen}"


# ---------------------------------------------------------------- all parts


class Parts:
    """The parts of a ledger, made in the order in which they depend on each other."""

    def __init__(self, base: Base, hooks: Hooks, source: PromptSource, heldout: PromptSource | None) -> None:
        sources: dict[Lane, PromptSource] = {"train": source}
        if heldout is not None:
            sources["eval"] = heldout
        self.lineage = Lineage(base)
        self.nodes = Nodes(base)
        self.storage = Storage(base)
        self.user_errors = UserErrors(base)
        self.playing = Playing(base)
        self.samples = Samples(base, self.storage, self.playing)
        self.tasks = Tasks(
            base,
            lineage=self.lineage,
            nodes=self.nodes,
            storage=self.storage,
            samples=self.samples,
            playing=self.playing,
            attempts=Attempts(base, self.playing),
            errors=self.user_errors,
        )
        self.shares = Shares(base, self.samples, self.nodes, self.storage)
        self.groups = Groups(
            base,
            hooks=hooks,
            sources=sources,
            lineage=self.lineage,
            playing=self.playing,
            tasks=self.tasks,
            samples=self.samples,
            shares=self.shares,
        )
        self.scoring = Scoring(base, self.groups, self.tasks)
        self.streams = Streams(base, self.playing, self.groups, self.shares, self.lineage)
        self.evaluations = Evaluations(base, self.groups, self.lineage, self.samples, heldout)
        self.leasing = Leasing(
            base,
            groups=self.groups,
            playing=self.playing,
            tasks=self.tasks,
            evaluations=self.evaluations,
            lineage=self.lineage,
            nodes=self.nodes,
            streams=self.streams,
        )
        self.steps = Steps(base, self.groups, self.lineage, self.nodes)
        self.batches = Batches(
            base,
            groups=self.groups,
            shares=self.shares,
            streams=self.streams,
            lineage=self.lineage,
            steps=self.steps,
            hooks=hooks,
        )
        self.stages = Stages(base, self.lineage, self.shares, self.storage)
        self.lost_rows = LostRows(base, self.groups, self.shares, self.batches, self.storage)
        self.kept = KeptEpisodes(base, self.groups, self.lineage)
        self.course = Course(base, hooks, source, self)
        self.balances = Balances(base, base.rules.policy, base.rules.balance_every)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
