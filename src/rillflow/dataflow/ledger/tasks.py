"""Tasks: leased to nodes, completed, failed, returned or cancelled, and retried a bounded number of times.

Invariants: a task is leased to at most one attempt; news from an attempt that does not hold its task changes nothing of
it. Many completions come together and each is taken or refused as if it had come alone, in the order in which they
came (`Judge` decides about them); those that are taken are written with one statement for each table. A task that ends
may complete its group: methods that end tasks return the groups, and the ledger settles them.

The only writer of tasks. `playing` has those of groups that are playing in memory: each change is made to both.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rillflow.dataflow.ledger.attempts import Attempts, Judge, Verdict, without_repeats
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.nodes import Nodes, UserErrors
from rillflow.dataflow.ledger.payload import Samples, Storage
from rillflow.dataflow.ledger.playing import Playing, PlayingGroup
from rillflow.dataflow.ledger.tables import Attempt, Policy, Task
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.dataflow.rules import derive_seed
from rillflow.errors import RillflowError
from rillflow.types import Ack, CompleteTask, FailTask, Lane, SampleMeta

PAYLOAD_GONE = "payload_gone"
ENDED = "ended."  # begins the counters of episodes that have a reward though they ended without an answer
NOTES = "notes"  # notes of agents for people: the first text of each subject
FAILURES_IN_A_ROW = "failures_in_a_row"
_MOST_NOTES, _LONGEST_NOTE = 16, 2000
_LANES: tuple[Lane, Lane] = ("train", "eval")
_ACCEPTED = Ack(accepted=True)


@dataclass
class Taken:
    """The answers to some completions, and the groups of the tasks that ended, each as often as one did."""

    answers: list[Ack | RillflowError] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


class Tasks(Part):
    def __init__(
        self,
        base: Base,
        *,
        lineage: Lineage,
        nodes: Nodes,
        storage: Storage,
        samples: Samples,
        playing: Playing,
        attempts: Attempts,
        errors: UserErrors,
    ) -> None:
        super().__init__(base)
        self._lineage = lineage
        self._nodes = nodes
        self._storage = storage
        self._samples = samples
        self._playing = playing
        self._attempts = attempts
        self._errors = errors
        self._judged_by: tuple[dict[str, Policy], Judge] | None = None
        self._no_deadline = (-1, -math.inf)  # a number of rollbacks, and a time before which no lease ends

    def create(self, groups: Iterable[PlayingGroup], *, size: int, step: int) -> None:
        """Add the tasks of new groups. A seed depends on the step of an evaluation, not on its number: an evaluation
        that is repeated after a rollback is equal."""
        rows: list[tuple[str, int, int]] = []
        for group in groups:
            for place in range(size):
                seed = derive_seed(self._rules.seed, group.lane, group.ord, step, place)
                rows.append((group.id, place, seed))
                group.tasks.append(Task(f"{group.id}.{place}", group.id, place, group.lane, seed, "pending"))
            self._playing.add(group)
        self._db.many("INSERT INTO tasks (grp, place, seed) VALUES (?, ?, ?)", rows)

    @property
    def pending(self) -> int:
        return self._playing.number_pending

    @property
    def any_pending(self) -> bool:
        return self._playing.number_pending > 0

    @property
    def running(self) -> int:
        return len(self._playing.leased())

    @property
    def oldest_lease(self) -> float | None:
        """When the task was leased that is held for the longest time."""
        return min((task.leased_at or 0.0 for task in self._playing.leased()), default=None)

    # ------------------------------------------------------------ leases

    def grace(self) -> None:
        """Give every live lease its full time, no more and no less, so that its node can renew it."""
        now = self._clock.now()
        # Not the later of both: a clock that was set back would keep a lost lease for as long.
        for task in self._playing.leased():
            task.deadline = now + self._rules.task_lease
        self._no_deadline = (-1, -math.inf)
        waiting = [task for lane in _LANES for task in self._playing.pending(lane)]
        late = [task for task in waiting if task.returned_at is not None and task.returned_at > now]
        for task in late:
            task.returned_at = now
        self._db.many(
            "UPDATE tasks SET returned_at = ? WHERE grp = ? AND place = ?", [(now, one.grp, one.place) for one in late]
        )

    def lease(self, tasks: Sequence[Task], node: str, ask: str) -> list[str]:
        """Lease pending tasks to a node; returns the ids of the attempts. `ask` is the request's attempt id."""
        now = self._clock.now()
        deadline = now + self._rules.task_lease
        homeless = {task.grp: None for task in tasks if task.home is None}
        attempts = [f"{task.id}-{task.leases + 1}" for task in tasks]  # part of URLs: nothing that needs quoting
        for task, attempt in zip(tasks, attempts, strict=True):
            self._playing.move(task, "leased", attempt, node)
            task.ask, task.home, task.leased_at, task.deadline = ask, task.home or node, now, deadline
            task.leases += 1
        self._db.many(
            "UPDATE tasks SET state = 'leased', attempt = ?, node = ?, home = ?, ask = ?, leases = ?, leased_at = ? "
            "WHERE grp = ? AND place = ?",
            [(task.attempt, node, task.home, ask, task.leases, now, task.grp, task.place) for task in tasks],
        )
        for group in homeless:
            self._set_home(group, node)
        evaluations = sum(task.lane == "eval" for task in tasks)
        self._nodes.leased(node, len(tasks) - evaluations, evaluations)
        return attempts

    def _set_home(self, group: str, home: str) -> None:
        """Let the pending tasks of a group be played by the node that plays the others."""
        if rest := [task for task in self._playing.get(group).tasks if task.state == "pending"]:
            self._playing.set_home(rest, home)
            self._db.run("UPDATE tasks SET home = ? WHERE grp = ? AND state = 'pending'", (home, group))

    def clear_home(self, node: str) -> None:
        """Let any node go on with the groups that this one played."""
        tasks = [task for lane in _LANES for task in self._playing.pending(lane, node)]
        self._playing.set_home(tasks, None)
        self._db.many(
            "UPDATE tasks SET home = NULL WHERE grp = ? AND place = ?", [(task.grp, task.place) for task in tasks]
        )

    def renew(self, node: str, attempts: Sequence[str]) -> list[str]:
        """Prolong the leases that the node still holds; returns the attempts whose lease is gone."""
        deadline, lost = self._clock.now() + self._rules.task_lease, []
        for attempt in attempts:
            task = self._playing.held(attempt)
            if task is not None and task.node == node:
                task.deadline = deadline
            elif (found := self._attempts.find(attempt)) is None or found.state != "done":
                lost.append(attempt)
        return lost

    def repeat(self, node: str, ask: str) -> list[Task]:
        """Return the tasks that the request `ask` has leased to the node and that it holds, with their full time."""
        deadline = self._clock.now() + self._rules.task_lease
        tasks = [task for task in self._playing.leased(node) if task.ask == ask]
        for task in tasks:
            task.deadline = deadline
        return sorted(tasks, key=lambda task: (task.lane, self._playing.get(task.grp).ord, task.place))

    # ------------------------------------------------------------ completions

    def complete(self, news: Sequence[CompleteTask]) -> Taken:
        """Take or refuse each completion; the answers come in the same order."""
        taken = Taken()
        for part in without_repeats(news):
            self._complete(part, taken)
        return taken

    def _complete(self, news: Sequence[CompleteTask], taken: Taken) -> None:
        judge, deaths = self._judge(), self._lineage.deaths
        done: dict[int, Verdict] = {}  # by their place among the answers
        for one in news:
            verdict = judge.judge(one, self._attempts.find(one.attempt), deaths)
            if verdict.kind == "done":
                done[len(taken.answers)] = verdict
                taken.answers.append(_ACCEPTED)
            elif verdict.error is not None:
                taken.answers.append(verdict.error)
            else:
                self._write(done, taken)  # those before it
                done = {}
                taken.answers.append(self._take_other(verdict, taken))
        self._write(done, taken)

    def _judge(self) -> Judge:
        """The judge of completions. It is made again when a policy has moved."""
        policies = self._lineage.policies()
        if self._judged_by is None or self._judged_by[0] is not policies:
            self._judged_by = policies, Judge(self._rules, self._lineage)
        return self._judged_by[1]

    def _take_other(self, verdict: Verdict, taken: Taken) -> Ack:
        """Carry out a verdict that does not make the task done."""
        held, news, cause = verdict.held, verdict.news, verdict.cause
        if verdict.kind == "repeated":
            return Ack(accepted=True, reason=cause)
        if verdict.kind == "late" or held is None:
            return self._refuse(held, news.samples)
        self._storage.note(sample.row for sample in news.samples)
        if verdict.kind == "again":
            self._give_back(held.task, cause, samples=len(news.samples))
            self._db.count(f"rerun.{cause}")
            return Ack(accepted=False, reason=f"{cause}: the task is played again")
        error = f"reward {news.reward}, {news.calls} model calls"
        taken.groups += self._end_badly(held.task, cause, error, samples=len(news.samples), digest=verdict.digest)
        return Ack(accepted=True, reason=cause)

    def _refuse(self, held: Attempt | None, samples: Sequence[SampleMeta]) -> Ack:
        """Answer news of an attempt that does not hold its task, if there is such an attempt."""
        self._db.count("late")
        self._storage.note(sample.row for sample in samples)
        if held is None:
            return Ack(accepted=False, reason="there is no such attempt")
        self._nodes.refused(held.node, held.task.lane, len(samples))
        return Ack(accepted=False, reason=f"the attempt was {held.state}{': ' if held.cause else ''}{held.cause}")

    def _write(self, done: dict[int, Verdict], taken: Taken) -> None:
        """Write completions. If a row is gone, write each alone, so that the others are taken."""
        if not done:
            return
        ends = [(verdict.held.task, verdict) for verdict in done.values() if verdict.held is not None]
        rows = [s.row for _, one in ends for s, live in zip(one.news.samples, one.live, strict=True) if live]
        if self._storage.take(rows):
            self._write_done(ends)
            taken.groups += [task.grp for task, _ in ends]
        elif len(done) > 1:
            for n, verdict in done.items():
                self._write({n: verdict}, taken)
        else:
            # Bounded, for a node whose rows never arrive.
            taken.groups += self._lose([task for task, _ in ends], PAYLOAD_GONE)
            taken.answers[next(iter(done))] = Ack(accepted=False, reason=f"{PAYLOAD_GONE}: the task is played again")

    def _write_done(self, ends: Sequence[tuple[Task, Verdict]]) -> None:
        now, news = self._clock.now(), [one.news for _, one in ends]
        self._storage.note(sample.row for _, one in ends if not all(one.live) for sample in one.news.samples)
        self._errors.add([error for one in news for error in one.errors])
        played: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for task, one in ends:
            node = task.node or ""
            played.setdefault((node, task.lane), []).append((one.news.seconds, len(one.news.samples)))
            self._playing.move(task, "done", task.attempt, node)
        self._db.many(
            "UPDATE tasks SET state = 'done', cause = '', error = '', reward = ?, given = ?, samples = ?, calls = ?, "
            "seconds = ?, metrics = ?, digest = ?, ended_at = ? WHERE grp = ? AND place = ?",
            [_values(task, one, now) for task, one in ends],
        )
        self._samples.add(ends)
        for (node, lane), episodes in played.items():
            self._nodes.succeeded(node, lane, episodes)
        self._note(news)
        for end, times in Counter(one.end[:100] for one in news if one.end).items():
            self._db.count(f"{ENDED}{end}", times)
        if not self._rules.group_reward:  # else they have not succeeded yet
            self._db.clear_counter(FAILURES_IN_A_ROW)

    def _note(self, news: Sequence[CompleteTask]) -> None:
        """Keep the first note of each subject, for everybody who looks at the run."""
        told = {subject[:100]: text[:_LONGEST_NOTE] for one in news for subject, text in one.notes.items()}
        if told:
            notes = told | self._db.meta(NOTES, {})
            self._db.set_meta(NOTES, dict(list(notes.items())[-_MOST_NOTES:]))

    # ------------------------------------------------------------ failures

    def fail(self, news: FailTask) -> tuple[Ack, list[str]]:
        """Take a failure; returns the groups of tasks that have ended with it."""
        held = self._attempts.find(news.attempt)
        held = held if held is not None and held.task.id == news.task else None
        if held is not None and held.state == "failed":
            return _ACCEPTED, []
        if held is None or held.state != "held":
            return self._refuse(held, []), []
        self._errors.add(news.errors)
        return _ACCEPTED, self._end_badly(held.task, news.cause[:200] or "unknown", news.error[:4000])

    def _end_badly(self, task: Task, cause: str, error: str, samples: int = 0, digest: str | None = None) -> list[str]:
        """Use an attempt up; `digest` identifies the completion that failed."""
        self._nodes.failed(task.node or "", task.lane, samples)
        self._count_failures(cause, error)
        task.failures += 1
        ended = task.failures >= self._rules.attempts
        self._end_lease(task, "failed", cause, "failed" if ended else "pending", digest=digest, lost=True)
        self._db.run(
            "UPDATE tasks SET failures = ?, cause = ?, error = ? WHERE grp = ? AND place = ?",
            (task.failures, cause, error, task.grp, task.place),
        )
        return [task.grp] if ended else []

    def _count_failures(self, cause: str, error: str, number: int = 1) -> None:
        self._db.count(FAILURES_IN_A_ROW, number)
        self._db.count(f"failures.{cause}", number)
        self._db.set_meta("last_failure", f"{cause}: {error}")

    def fail_done(self, group: str, episodes: Sequence[tuple[int, str]], cause: str, error: str) -> None:
        """Fail done tasks whose group has no reward, given their places and attempts."""
        for place, _ in episodes:
            self._samples.forget(group, place)
            self._attempts.end_done(group, place, "failed", cause, self._clock.now())
        self._db.many(
            "UPDATE tasks SET state = 'failed', cause = ?, error = ?, failures = failures + 1, attempt = NULL, "
            "node = NULL, reward = NULL, samples = 0 WHERE grp = ? AND place = ?",
            [(cause, error, group, place) for place, _ in episodes],
        )
        self._playing.reload(group)
        self._count_failures(cause, error, len(episodes))

    def reward(self, group: str, place: int, reward: float, metrics: dict[str, float]) -> None:
        """Set the reward of a done task and of its samples."""
        self._db.run(
            "UPDATE tasks SET reward = ?, metrics = ? WHERE grp = ? AND place = ?",
            (reward, json.dumps(metrics), group, place),
        )
        self._samples.reward(group, place, reward)

    # ------------------------------------------------------------ returning

    def _end_lease(
        self, task: Task, state: str, cause: str, following: str, *, digest: str | None = None, lost: bool = False
    ) -> None:
        """End the attempt that holds a task without its being done; the task is `following` then. One that the node has
        `lost` goes to another node, when there is one."""
        now = self._clock.now()
        self._attempts.end(task, state, cause, digest)
        if lost:
            task.last_node, task.returned_at = task.node, now
        self._playing.move(task, following)
        self._db.run(
            "UPDATE tasks SET state = ?, attempt = NULL, node = NULL, last_node = ?, returned_at = ? "
            "WHERE grp = ? AND place = ?",
            (following, task.last_node, task.returned_at, task.grp, task.place),
        )

    def _give_back(self, task: Task, cause: str, samples: int = 0) -> None:
        """End a lease without a verdict on the episode: no attempt is used up."""
        self._nodes.returned(task.node or "", task.lane, samples, stale=cause == "stale")
        self._end_lease(task, "returned", cause, "pending")

    def _lose(self, tasks: Iterable[Task], cause: str) -> list[str]:
        """Return leases that are gone with their node, or end tasks that have lost too many; returns those' groups."""
        ended = []
        for task in tasks:
            self._nodes.returned(task.node or "", task.lane)
            self._db.count(f"returned.{cause}")
            task.returns += 1
            last = task.returns >= self._rules.most_returns
            self._end_lease(task, "returned", cause, "failed" if last else "pending", lost=True)
            self._db.run(
                "UPDATE tasks SET returns = ?, cause = ? WHERE grp = ? AND place = ?",
                (task.returns, cause, task.grp, task.place),
            )
            ended += [task.grp] if last else []
        return ended

    def _leased(self, node: str | None = None) -> list[Task]:
        return sorted(self._playing.leased(node), key=lambda task: task.id)

    def expire(self) -> list[str]:
        """Return the leases whose deadline has passed; returns the groups of tasks that ended."""
        now, known = self._clock.now(), self._no_deadline
        if known[0] == self._db.rollbacks and now <= known[1]:
            return []  # leases are only ever prolonged
        ended = self._lose([task for task in self._leased() if task.deadline < now], "lease_expired")
        first = min((task.deadline for task in self._playing.leased()), default=now + self._rules.task_lease)
        self._no_deadline = (self._db.rollbacks, first)
        return ended

    def lose_node(self, node: str, cause: str) -> list[str]:
        """Return all leases of a node that is lost; returns the groups of tasks that ended."""
        ended = self._lose(self._leased(node), cause)
        self.clear_home(node)
        return ended

    def return_node(self, node: str, cause: str) -> None:
        """Return the leases of a node that leaves. No attempt is used up."""
        for task in self._leased(node):
            self._give_back(task, cause)
            self._db.count(f"returned.{cause}")
        self.clear_home(node)

    def return_all(self, cause: str) -> None:
        for task in self._leased():
            self._give_back(task, cause)

    def cancel(self, group: str, cause: str) -> None:
        """Cancel the tasks of a group that are not done."""
        for task in self._playing.get(group).tasks:
            if task.state == "leased":
                self._nodes.cancelled(task.node or "", task.lane)
                self._attempts.end(task, "cancelled", cause)
            if task.state in ("pending", "leased"):
                self._playing.move(task, "cancelled", task.attempt, task.node)
        self._db.run(
            "UPDATE tasks SET state = 'cancelled', cause = ? WHERE grp = ? AND state IN ('pending', 'leased')",
            (cause, group),
        )

    def play_again(self, group: str, place: int, cause: str) -> bool:
        """Take a done task back: same order, same seed, no attempt used up. False for one that is not done. Its group
        must be read again."""
        if not self._attempts.end_done(group, place, "returned", cause):
            return False
        self._samples.forget(group, place)
        self._db.run(
            "UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL, reward = NULL, samples = 0 "
            "WHERE grp = ? AND place = ?",
            (group, place),
        )
        return True


def _values(task: Task, one: Verdict, now: float) -> tuple[float | int | str, ...]:
    news = one.news
    metrics = msgspec.json.encode(news.metrics).decode() if news.metrics else "{}"
    return (
        *(news.reward, news.reward, len(news.samples), news.calls, news.seconds, metrics, one.digest, now),
        *(task.grp, task.place),
    )
