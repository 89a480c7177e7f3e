"""Tasks: leased to nodes, completed, failed, returned or cancelled, and retried a bounded number of times.

Invariants: a task is leased to at most one attempt; news from an attempt that does not hold its task changes nothing of
it. Many completions come together and each is taken or refused as if it had come alone, in the order in which they
came (`completions` judges them); those that are taken are written with one statement for each table. A task that ends
may complete its group: methods that end tasks return the groups, and the ledger settles them.

The only writer of tasks, attempts, samples and group_versions.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from rillflow.dataflow.ledger.completions import Judge, Verdict, without_repeats
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.tables import HELD, HeldTask, Policy, Task
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.dataflow.ledger.workers import Nodes, Storage, UserErrors
from rillflow.dataflow.rules import derive_seed
from rillflow.errors import RillflowError
from rillflow.types import Ack, CompleteTask, FailTask, Lane, SampleMeta

PAYLOAD_GONE = "payload_gone"
ENDED = "ended."  # begins the counters of episodes that have a reward though they ended without an answer
NOTES = "notes"  # what people are told of how agents play: the first text of each subject
FAILURES_IN_A_ROW = "failures_in_a_row"
_MOST_NOTES, _LONGEST_NOTE = 16, 2000


@dataclass
class Taken:
    """The answers to some completions, and the groups of the tasks that ended, each as often as one did."""

    answers: list[Ack | RillflowError] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


class Tasks(Part):
    def __init__(self, base: Base, lineage: Lineage, nodes: Nodes, storage: Storage, errors: UserErrors) -> None:
        super().__init__(base)
        self._lineage = lineage
        self._nodes = nodes
        self._storage = storage
        self._errors = errors
        self._judged_by: tuple[dict[str, Policy], Judge] | None = None
        self._no_deadline = (-1, -math.inf)  # as of so many rollbacks, no lease ends before this time

    def create(self, group: str, lane: Lane, index: int, *, size: int, number: int, step: int) -> None:
        """Add the tasks of a new group. A seed depends on the step of an evaluation, not on its number: an evaluation
        that is repeated after a rollback is equal."""
        self._db.many(
            "INSERT INTO tasks (id, grp, lane, round, ord, place, seed) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (f"{group}.{n}", group, lane, number, index, n, derive_seed(self._rules.seed, lane, index, step, n))
                for n in range(size)
            ],
        )

    @property
    def pending(self) -> int:
        return int(self._db.value("SELECT count(*) FROM tasks WHERE state = 'pending'"))

    @property
    def any_pending(self) -> bool:
        return bool(self._db.value("SELECT EXISTS (SELECT 1 FROM tasks WHERE state = 'pending')"))

    @property
    def running(self) -> int:
        return int(self._db.value("SELECT count(*) FROM tasks WHERE state = 'leased'"))

    # ------------------------------------------------------------ leases

    def grace(self) -> None:
        """Give every live lease its full time, no more and no less, so that its node can renew it."""
        now = self._clock.now()
        # Not the later of both: a clock that was set back would keep a lost lease for as long.
        self._db.run("UPDATE tasks SET deadline = ? WHERE state = 'leased'", (now + self._rules.task_lease,))
        self._db.run("UPDATE tasks SET returned_at = ? WHERE state = 'pending' AND returned_at > ?", (now, now))
        self._no_deadline = (-1, -math.inf)

    def lease(self, tasks: Sequence[Task], node: str, ask: str) -> list[str]:
        """Lease pending tasks to a node; returns the ids of the attempts. `ask` is the request's attempt id."""
        now = self._clock.now()
        deadline = now + self._rules.task_lease
        attempts = [f"{task.id}-{task.leases + 1}" for task in tasks]  # part of URLs: nothing that needs quoting
        self._db.many(
            "UPDATE tasks SET state = 'leased', attempt = ?, node = ?, home = ifnull(home, ?), deadline = ?, ask = ?, "
            "leases = leases + 1 WHERE id = ?",
            [(attempt, node, node, deadline, ask, task.id) for attempt, task in zip(attempts, tasks, strict=True)],
        )
        self._db.many(
            "INSERT INTO attempts (id, task, node, leased_at) VALUES (?, ?, ?, ?)",
            [(attempt, task.id, node, now) for attempt, task in zip(attempts, tasks, strict=True)],
        )
        homeless = {task.grp: None for task in tasks if task.home is None}
        self._db.many(
            "UPDATE tasks SET home = ? WHERE grp = ? AND state = 'pending'", [(node, group) for group in homeless]
        )
        evaluations = sum(task.lane == "eval" for task in tasks)
        self._nodes.leased(node, len(tasks) - evaluations, evaluations)
        return attempts

    def renew(self, node: str, attempts: Sequence[str]) -> list[str]:
        """Prolong the leases that the node still holds; returns the attempts whose lease is gone."""
        if not attempts:
            return []
        kept = self._prolong(node, attempts)
        if others := [attempt for attempt in attempts if attempt not in kept]:
            query = "SELECT a.id FROM json_each(?) j JOIN attempts a ON a.id = j.value WHERE a.state = 'done'"
            kept |= set(self._db.column(query, (json.dumps(others),)))
        return [attempt for attempt in others if attempt not in kept]

    def _prolong(self, node: str, attempts: Sequence[str]) -> set[str]:
        """Give those of the leases their full time that the node holds; returns them."""
        query = (
            "UPDATE tasks SET deadline = ? WHERE state = 'leased' AND node = ? "
            "AND attempt IN (SELECT value FROM json_each(?)) RETURNING attempt"
        )
        return set(self._db.column(query, (self._clock.now() + self._rules.task_lease, node, json.dumps(attempts))))

    def repeat(self, node: str, ask: str) -> list[Task]:
        """Return the tasks that the request `ask` has leased to the node and that it holds, with their full time."""
        query = f"SELECT {Task.columns()} FROM tasks WHERE state = 'leased' AND node = ? AND ask = ?"
        tasks = self._db.rows(Task, f"{query} ORDER BY lane, ord, place", (node, ask))
        if tasks:
            self._prolong(node, [task.attempt for task in tasks if task.attempt])
        return tasks

    def clear_home(self, node: str) -> None:
        """Let any node go on with the groups that this one played."""
        for lane in ("train", "eval"):
            self._db.run("UPDATE tasks SET home = NULL WHERE state = 'pending' AND lane = ? AND home = ?", (lane, node))

    # ------------------------------------------------------------ completions

    def complete(self, news: Sequence[CompleteTask]) -> Taken:
        """Take or refuse each completion; the answers come in the same order."""
        taken = Taken()
        for part in without_repeats(news):
            self._complete(part, taken)
        return taken

    def _complete(self, news: Sequence[CompleteTask], taken: Taken) -> None:
        found, judge, deaths = self._attempts([one.attempt for one in news]), self._judge(), self._lineage.deaths
        done: dict[int, Verdict] = {}  # by their place among the answers
        for one in news:
            verdict = judge.judge(one, found.get(one.attempt), deaths)
            if verdict.kind == "done":
                done[len(taken.answers)] = verdict
                taken.answers.append(Ack(accepted=True))
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

    def _attempts(self, attempts: Sequence[str]) -> dict[str, HeldTask]:
        query = f"SELECT {HELD} FROM json_each(?) j JOIN attempts a ON a.id = j.value JOIN tasks t ON t.id = a.task"
        return {held.asked: held for held in self._db.rows(HeldTask, query, (json.dumps(attempts),))}

    def _take_other(self, verdict: Verdict, taken: Taken) -> Ack:
        """Carry out a verdict that does not make the task done."""
        held, news, cause = verdict.held, verdict.news, verdict.cause
        if verdict.kind == "repeated":
            return Ack(accepted=True, reason=cause)
        if verdict.kind == "late" or held is None:
            return self._refuse(held, news.samples)
        self._storage.note(sample.row for sample in news.samples)
        if verdict.kind == "again":
            self._give_back(held, cause, samples=len(news.samples))
            self._db.count(f"rerun.{cause}")
            return Ack(accepted=False, reason=f"{cause}: the task is played again")
        error = f"reward {news.reward}, {news.calls} model calls"
        taken.groups += self._end_badly(held, cause, error, samples=len(news.samples), digest=verdict.digest)
        return Ack(accepted=True, reason=cause)

    def _refuse(self, held: HeldTask | None, samples: Sequence[SampleMeta]) -> Ack:
        """Answer news of an attempt that does not hold its task, if there is such an attempt."""
        self._db.count("late")
        self._storage.note(sample.row for sample in samples)
        if held is None:
            return Ack(accepted=False, reason="there is no such attempt")
        self._nodes.refused(held.holder, held.lane, len(samples))
        return Ack(accepted=False, reason=f"the attempt was {held.state}{': ' if held.cause else ''}{held.cause}")

    def _write(self, done: dict[int, Verdict], taken: Taken) -> None:
        """Write completions. Where a row is gone, each is written alone: only those whose rows are there are taken."""
        if not done:
            return
        ends = [(verdict.held, verdict) for verdict in done.values() if verdict.held is not None]
        rows = [s.row for _, one in ends for s, live in zip(one.news.samples, one.live, strict=True) if live]
        if self._storage.take(rows):
            self._write_done(ends)
            taken.groups += [held.grp for held, _ in ends]
        elif len(done) > 1:
            for n, verdict in done.items():
                self._write({n: verdict}, taken)
        else:
            # A node that writes to nowhere must not go on for ever.
            taken.groups += self._lose([held for held, _ in ends], PAYLOAD_GONE)
            taken.answers[next(iter(done))] = Ack(accepted=False, reason=f"{PAYLOAD_GONE}: the task is played again")

    def _write_done(self, ends: Sequence[tuple[HeldTask, Verdict]]) -> None:
        now, news = self._clock.now(), [one.news for _, one in ends]
        self._storage.note(sample.row for _, one in ends if not all(one.live) for sample in one.news.samples)
        self._errors.add([error for one in news for error in one.errors])
        self._db.many(
            "UPDATE attempts SET state = 'done', cause = '', digest = ?, ended_at = ? WHERE id = ?",
            [(one.digest, now, one.news.attempt) for _, one in ends],
        )
        self._db.many(
            "UPDATE tasks SET state = 'done', cause = '', error = '', reward = ?, given = ?, samples = ?, calls = ?, "
            "seconds = ?, metrics = ? WHERE id = ?",
            [_task_values(one) for one in news],
        )
        self._db.many(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [values for held, one in ends for values in _sample_values(held, one)],
        )
        self._db.many(
            "INSERT INTO group_versions VALUES (?, ?, ?, ?) ON CONFLICT (grp, producer) DO UPDATE SET "
            "oldest = min(oldest, excluded.oldest), newest = max(newest, excluded.newest)",
            _versions(ends),
        )
        played: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for held, one in ends:
            played.setdefault((held.holder, held.lane), []).append((one.news.seconds, len(one.news.samples)))
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
        held = self._attempts([news.attempt]).get(news.attempt)
        held = held if held is not None and held.id == news.task else None
        if held is not None and held.state == "failed":
            return Ack(accepted=True), []
        if held is None or held.state != "held":
            return self._refuse(held, []), []
        self._errors.add(news.errors)
        return Ack(accepted=True), self._end_badly(held, news.cause[:200] or "unknown", news.error[:4000])

    def _end_badly(
        self, held: HeldTask, cause: str, error: str, samples: int = 0, digest: str | None = None
    ) -> list[str]:
        """Use an attempt up; `digest` is that of the completion that told of it."""
        self._end_attempts([held.asked], "failed", cause, digest)
        self._nodes.failed(held.holder, held.lane, samples)
        self._count_failures(cause, error)
        last = held.failures + 1 >= self._rules.attempts
        self._db.run(
            "UPDATE tasks SET failures = failures + 1, cause = ?, error = ?, state = ?, attempt = NULL, node = NULL, "
            "last_node = ?, returned_at = ? WHERE id = ?",
            (cause, error, "failed" if last else "pending", held.node, self._clock.now(), held.id),
        )
        return [held.grp] if last else []

    def _count_failures(self, cause: str, error: str, number: int = 1) -> None:
        self._db.count(FAILURES_IN_A_ROW, number)
        self._db.count(f"failures.{cause}", number)
        self._db.set_meta("last_failure", f"{cause}: {error}")

    def _end_attempts(self, attempts: Iterable[str | None], state: str, cause: str, digest: str | None = None) -> None:
        now = self._clock.now()
        self._db.many(
            "UPDATE attempts SET state = ?, cause = ?, digest = ?, ended_at = ? WHERE id = ?",
            [(state, cause, digest, now, attempt) for attempt in attempts],
        )

    def fail_done(self, group: str, episodes: Sequence[tuple[int, str]], cause: str, error: str) -> None:
        """Fail done tasks for good, given their places and attempts: their group has no reward."""
        now = self._clock.now()
        for place, _ in episodes:
            self.forget(group, place)
        self._db.many(
            "UPDATE attempts SET state = 'failed', cause = ?, ended_at = ? WHERE id = ?",
            [(cause, now, attempt) for _, attempt in episodes],
        )
        self._db.many(
            "UPDATE tasks SET state = 'failed', cause = ?, error = ?, failures = failures + 1, attempt = NULL, "
            "node = NULL, reward = NULL, samples = 0 WHERE grp = ? AND place = ?",
            [(cause, error, group, place) for place, _ in episodes],
        )
        self._count_failures(cause, error, len(episodes))

    def reward(self, group: str, place: int, reward: float, metrics: dict[str, float]) -> None:
        """Set the reward of a done task and of its samples."""
        self._db.run(
            "UPDATE tasks SET reward = ?, metrics = ? WHERE grp = ? AND place = ?",
            (reward, json.dumps(metrics), group, place),
        )
        self._db.run("UPDATE samples SET reward = ? WHERE grp = ? AND place = ?", (reward, group, place))

    # ------------------------------------------------------------ returning

    def _give_back(self, held: HeldTask, cause: str, samples: int = 0) -> None:
        """End a lease without a verdict on the episode: no attempt is used up."""
        self._end_attempts([held.attempt], "returned", cause)
        self._nodes.returned(held.holder, held.lane, samples, stale=cause == "stale")
        self._db.run("UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL WHERE id = ?", (held.id,))

    def _lose(self, leases: Iterable[HeldTask], cause: str) -> list[str]:
        """Return leases that are gone with their node, or end tasks that have lost too many; returns those' groups."""
        ended, now = [], self._clock.now()
        for held in leases:
            self._end_attempts([held.attempt], "returned", cause)
            self._nodes.returned(held.holder, held.lane)
            self._db.count(f"returned.{cause}")
            last = held.returns + 1 >= self._rules.most_returns
            self._db.run(
                "UPDATE tasks SET returns = returns + 1, cause = ?, state = ?, attempt = NULL, node = NULL, "
                "last_node = ?, returned_at = ? WHERE id = ?",
                (cause, "failed" if last else "pending", held.node, now, held.id),
            )
            ended += [held.grp] if last else []
        return ended

    def _leased(self, where: str = "1", values: tuple[str | float, ...] = ()) -> list[HeldTask]:
        query = f"SELECT {HELD} FROM tasks t JOIN attempts a ON a.id = t.attempt WHERE t.state = 'leased' AND {where}"
        return self._db.rows(HeldTask, f"{query} ORDER BY t.id", values)

    def expire(self) -> list[str]:
        """Return the leases whose deadline has passed; returns the groups of tasks that ended."""
        now, known = self._clock.now(), self._no_deadline
        if known[0] == self._db.rollbacks and now <= known[1]:
            return []  # leases are only ever prolonged
        ended = self._lose(self._leased("t.deadline < ?", (now,)), "lease_expired")
        first = self._db.value("SELECT min(deadline) FROM tasks WHERE state = 'leased'")
        self._no_deadline = (self._db.rollbacks, now + self._rules.task_lease if first is None else first)
        return ended

    def lose_node(self, node: str, cause: str) -> list[str]:
        """Return all leases of a node that is lost; returns the groups of tasks that ended."""
        ended = self._lose(self._leased("t.node = ?", (node,)), cause)
        self.clear_home(node)
        return ended

    def return_node(self, node: str, cause: str) -> None:
        """Return what a node holds that leaves. It counts against nobody."""
        for held in self._leased("t.node = ?", (node,)):
            self._give_back(held, cause)
            self._db.count(f"returned.{cause}")
        self.clear_home(node)

    def return_all(self, cause: str) -> None:
        for held in self._leased():
            self._give_back(held, cause)

    def cancel(self, group: str, cause: str) -> None:
        """Cancel the tasks of a group that are not done."""
        held = self._leased("t.grp = ?", (group,))
        self._end_attempts([one.attempt for one in held], "cancelled", cause)
        for one in held:
            self._nodes.cancelled(one.holder, one.lane)
        self._db.run(
            "UPDATE tasks SET state = 'cancelled', cause = ? WHERE grp = ? AND state IN ('pending', 'leased')",
            (cause, group),
        )

    def play_again(self, group: str, place: int, cause: str) -> bool:
        """Take a done task back: same order, same seed, no attempt used up. False for one that is not done."""
        query = "SELECT attempt FROM tasks WHERE grp = ? AND place = ? AND state = 'done'"
        attempt = self._db.value(query, (group, place))
        if attempt is None:
            return False
        self.forget(group, place)
        self._db.run("UPDATE attempts SET state = 'returned', cause = ? WHERE id = ?", (cause, attempt))
        self._db.run(
            "UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL, reward = NULL, samples = 0 "
            "WHERE grp = ? AND place = ?",
            (group, place),
        )
        return True

    # ------------------------------------------------------------ samples

    def release(self, group: str, producer: str | None = None) -> None:
        """Let go of the rows of this group, or of this producer in it: nobody will ask for them again."""
        where, values = ("grp = ?", [group]) if producer is None else ("grp = ? AND policy = ?", [group, producer])
        rows = self._db.all(f"UPDATE samples SET live = 0 WHERE {where} AND live = 1 RETURNING unit, segment", values)
        self._storage.let_go((*place, number) for place, number in Counter(map(tuple, rows)).items())

    def release_many(self, parts: Sequence[tuple[str, str]]) -> None:
        """Let go of the rows of many groups' producers at once."""
        keys = json.dumps(parts)
        named = "json_each(?) j JOIN samples s ON s.grp = j.value ->> 0 AND s.policy = j.value ->> 1 WHERE s.live = 1"
        rows = self._db.all(f"SELECT s.unit, s.segment, count(*) FROM {named} GROUP BY s.unit, s.segment", (keys,))
        self._db.many("UPDATE samples SET live = 0 WHERE grp = ? AND policy = ? AND live = 1", parts)
        self._storage.let_go(tuple(row) for row in rows)

    def forget(self, group: str, place: int) -> None:
        """Delete the samples of a task."""
        query = "SELECT unit, segment, count(*) FROM samples WHERE grp = ? AND place = ? AND live = 1 GROUP BY 1, 2"
        self._storage.let_go(tuple(row) for row in self._db.all(query, (group, place)))
        self._db.run("DELETE FROM samples WHERE grp = ? AND place = ?", (group, place))

    def forget_versions(self, group: str) -> None:
        """Drop the versions of a group that plays no more."""
        self._db.run("DELETE FROM group_versions WHERE grp = ?", (group,))

    def count_versions(self, group: str) -> None:
        """Take the versions of a training group, which plays again, from the samples that are left."""
        self.forget_versions(group)
        self._db.run(
            "INSERT INTO group_versions SELECT grp, policy, min(oldest), max(newest) FROM samples "
            "WHERE grp = ? AND trained > 0 AND live = 1 GROUP BY policy",
            (group,),
        )


def _task_values(news: CompleteTask) -> tuple[float | int | str, ...]:
    metrics = msgspec.json.encode(news.metrics).decode() if news.metrics else "{}"
    return (news.reward, news.reward, len(news.samples), news.calls, news.seconds, metrics, news.task)


def _sample_values(held: HeldTask, one: Verdict) -> Iterator[tuple[str | int | float, ...]]:
    for n, (sample, live) in enumerate(zip(one.news.samples, one.live, strict=True)):
        at = sample.row
        yield (
            *(held.grp, held.place, n, sample.policy, at.unit, at.segment, at.offset, at.length, sample.tokens),
            *(sample.trained, sample.oldest, sample.newest, sample.reward, sample.truncated, live),
            *(sample.agent, sample.turn),
        )


def _versions(ends: Sequence[tuple[HeldTask, Verdict]]) -> list[tuple[str, str, int, int]]:
    """Return the oldest and newest version of each group's trained tokens, by the policy that sampled them."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for held, one in ends:
        if held.lane == "train":
            for s in one.news.samples:
                if s.trained:
                    key = (held.grp, s.policy)
                    oldest, newest = found.get(key, (s.oldest, s.newest))
                    found[key] = (min(oldest, s.oldest), max(newest, s.newest))
    return [(*key, *versions) for key, versions in found.items()]
