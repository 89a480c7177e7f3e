"""Tasks: leased in order of admission, completed by the attempt that holds them, retried a bounded number of times.

News from an attempt that no longer holds its task changes nothing; the same news twice is taken once.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.errors import BadRequest
from rillflow.types import Ack, CompleteTask, FailTask, SampleMeta, Task, TaskLease

# A completion that counts as a failure of the episode: there is nothing in it to train on, or no reward.
NO_MODEL_CALL, BAD_REWARD = "no_model_call", "bad_reward"
_LARGEST_REWARD = 3.4e38  # a trainer's numbers have 32 bits; statistics of larger ones are no numbers

_LEASABLE = (
    "SELECT t.*, g.prompt FROM tasks t JOIN groups g ON g.id = t.grp "
    "WHERE t.state = 'pending' AND ifnull(t.last_node = ? AND t.returned_at > ?, 0) = 0"
)


class Tasks(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes

    def grace(self) -> None:
        """Every live lease has its full time again, no more and no less, so that its node can renew it."""
        now = self._clock.now()
        # Not the later of both: a clock that was set back would keep a lost lease for as long.
        self._db.run("UPDATE tasks SET deadline = ? WHERE state = 'leased'", (now + self._rules.task_lease,))
        self._db.run("UPDATE tasks SET returned_at = ? WHERE state = 'pending' AND returned_at > ?", (now, now))

    @property
    def pending(self) -> int:
        return int(self._db.value("SELECT count(*) FROM tasks WHERE state = 'pending'"))

    @property
    def running(self) -> int:
        return int(self._db.value("SELECT count(*) FROM tasks WHERE state = 'leased'"))

    # ------------------------------------------------------------ leasing

    def lease(self, node: str, version: int, want: int) -> list[TaskLease]:
        """Up to `want` tasks that a node on `version` may play: evaluations first, then by order of admission."""
        if self._lineage.died(version, version):
            return []
        leases = self._lease_rows(self._pending_eval(node, version, want), node)
        if len(leases) < want and self._may_train(version):
            leases += self._lease_rows(self._pending_train(node, want - len(leases)), node)
        return leases

    def _may_train(self, version: int) -> bool:
        """Within the bound; on-policy, weights that are published but not committed yet are not the policy."""
        behind = self._lineage.head - version
        return behind == 0 if self._rules.on_policy else behind <= self._rules.staleness

    def _pending_eval(self, node: str, version: int, want: int) -> list[sqlite3.Row]:
        return self._db.all(
            f"{_LEASABLE} AND t.lane = 'eval' AND (SELECT version FROM rounds WHERE id = t.round) <= ? "
            "ORDER BY t.round, t.ord, t.place LIMIT ?",
            (*self._left_to_others(node), version, want),
        )

    def _pending_train(self, node: str, want: int) -> list[sqlite3.Row]:
        return self._db.all(
            f"{_LEASABLE} AND t.lane = 'train' AND t.ord <= ? ORDER BY t.ord, t.place LIMIT ?",
            (*self._left_to_others(node), self._groups.window_end(), want),
        )

    def _left_to_others(self, node: str) -> tuple[str, float]:
        """A task that went wrong on this node is left to another for a while, when there is one."""
        return node if self._nodes.healthy > 1 else "", self._clock.now() - self._rules.node_timeout

    def _lease_rows(self, rows: Iterable[sqlite3.Row], node: str) -> list[TaskLease]:
        leases = [self._lease_row(row, node) for row in rows]
        if leases:
            self._nodes.add(node, leased=len(leases))
        return leases

    def _lease_row(self, row: sqlite3.Row, node: str) -> TaskLease:
        attempt = f"{row['id']}-{row['leases'] + 1}"  # part of URLs: no character that would need quoting
        now, seconds = self._clock.now(), self._rules.task_lease
        self._db.run(
            "UPDATE tasks SET state = 'leased', attempt = ?, node = ?, deadline = ?, leases = leases + 1 WHERE id = ?",
            (attempt, node, now + seconds, row["id"]),
        )
        self._db.run(
            "INSERT INTO attempts (id, task, node, leased_at) VALUES (?, ?, ?, ?)", (attempt, row["id"], node, now)
        )
        prompt = self._groups.prompt(row["lane"], row["ord"], row["prompt"])
        task = Task(
            id=row["id"], prompt=prompt, group=row["grp"], place=row["place"], lane=row["lane"], seed=row["seed"]
        )
        return TaskLease(task=task, attempt=attempt, seconds=seconds)

    def renew(self, node: str, attempts: list[str]) -> list[str]:
        """Prolong the leases that the node still holds; returns the attempts whose lease is gone."""
        deadline = self._clock.now() + self._rules.task_lease
        lost = []
        for attempt in attempts:
            row = self._db.one("SELECT task, node, state FROM attempts WHERE id = ?", (attempt,))
            if row is not None and row["state"] == "held" and row["node"] == node:
                self._db.run("UPDATE tasks SET deadline = ? WHERE id = ?", (deadline, row["task"]))
            elif row is None or row["state"] != "done":
                lost.append(attempt)
        return lost

    # ------------------------------------------------------------ endings

    def _attempt(self, task: str, attempt: str) -> sqlite3.Row | None:
        return self._db.one(
            "SELECT t.*, a.state AS held, a.cause AS why, a.node AS holder FROM attempts a "
            "JOIN tasks t ON t.id = a.task WHERE a.id = ? AND a.task = ?",
            (attempt, task),
        )

    def _refused(self, row: sqlite3.Row | None, produced: int = 0) -> Ack:
        self._db.count("late")
        if row is None:
            return Ack(accepted=False, reason="there is no such attempt")
        self._nodes.add(row["holder"], refused=1, produced=produced)
        return Ack(accepted=False, reason=f"the attempt was {row['held']}{': ' if row['why'] else ''}{row['why']}")

    def complete(self, news: CompleteTask) -> Ack:
        self._check(news)
        row = self._attempt(news.task, news.attempt)
        if row is not None and (row["held"] == "done" or row["why"] in (NO_MODEL_CALL, BAD_REWARD)):
            return Ack(accepted=True, reason=row["why"])
        if row is None or row["held"] != "held":
            return self._refused(row, len(news.samples))
        if cause := self._why_again(row["lane"], news.samples):
            self._give_back(row, cause, produced=len(news.samples))
            self._db.count(f"rerun.{cause}")
            return Ack(accepted=False, reason=f"{cause}: the task is played again")
        if cause := _why_failed(row["lane"], news):
            self._fail(row, cause, f"reward {news.reward}, {news.calls} model calls", produced=len(news.samples))
            return Ack(accepted=True, reason=cause)
        self._done(row, news)
        return Ack(accepted=True)

    def _check(self, news: CompleteTask) -> None:
        for sample in news.samples:
            self._lineage.check_policy(sample.policy)
            whole = 0 <= sample.trained <= sample.tokens and (
                sample.trained == 0 or 0 <= sample.oldest <= sample.newest
            )
            if not whole or not math.isfinite(sample.reward):
                raise BadRequest(f"a sample of {news.task!r:.80} contradicts itself: {sample}", "check the node")

    def _why_again(self, lane: str, samples: list[SampleMeta]) -> str:
        """Why an episode that ended well must be played again, if so: its versions are dead, or not on-policy."""
        trained = [sample for sample in samples if sample.trained]
        if any(self._lineage.died(sample.oldest, sample.newest) for sample in trained):
            return "rolled_back"
        head = self._lineage.head
        if lane == "train" and self._rules.on_policy and any(sample.oldest < head for sample in trained):
            return "stale"
        return ""

    def _done(self, row: sqlite3.Row, news: CompleteTask) -> None:
        self._end_attempt(row["attempt"], "done", "")
        self._db.run(
            "UPDATE tasks SET state = 'done', cause = '', error = '', reward = ?, samples = ?, calls = ?, "
            "seconds = ?, metrics = ? WHERE id = ?",
            (news.reward, len(news.samples), news.calls, news.seconds, json.dumps(news.metrics), news.task),
        )
        self._db.many(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_sample_values(row, number, sample) for number, sample in enumerate(news.samples)],
        )
        trained = [sample for sample in news.samples if sample.trained]
        if trained:
            oldest, newest = min(s.oldest for s in trained), max(s.newest for s in trained)
            self._db.run(
                "UPDATE groups SET oldest = min(ifnull(oldest, ?), ?), newest = max(ifnull(newest, ?), ?) WHERE id = ?",
                (oldest, oldest, newest, newest, row["grp"]),
            )
        self._nodes.add(row["holder"], completed=1, produced=len(news.samples), accepted=len(news.samples))
        self._db.clear_counter("failures_in_a_row")
        self._groups.settle(row["grp"])

    def fail(self, news: FailTask) -> Ack:
        row = self._attempt(news.task, news.attempt)
        if row is not None and row["held"] == "failed":
            return Ack(accepted=True)
        if row is None or row["held"] != "held":
            return self._refused(row)
        self._fail(row, news.cause[:200] or "unknown", news.error[:4000])
        return Ack(accepted=True)

    def _fail(self, row: sqlite3.Row, cause: str, error: str, produced: int = 0) -> None:
        self._end_attempt(row["attempt"], "failed", cause)
        self._nodes.add(row["holder"], failed=1, produced=produced)
        self._db.count("failures_in_a_row")
        self._db.count(f"failures.{cause}")
        self._db.set_meta("last_failure", f"{cause}: {error}")
        self._db.run(
            "UPDATE tasks SET failures = failures + 1, cause = ?, error = ? WHERE id = ?", (cause, error, row["id"])
        )
        self._retry_or_end(row, row["failures"] + 1 >= self._rules.attempts)

    def _retry_or_end(self, row: sqlite3.Row, for_good: bool) -> None:
        self._db.run(
            "UPDATE tasks SET state = ?, attempt = NULL, node = NULL, last_node = ?, returned_at = ? WHERE id = ?",
            ("failed" if for_good else "pending", row["node"], self._clock.now(), row["id"]),
        )
        if for_good:
            self._groups.settle(row["grp"])

    def _end_attempt(self, attempt: str, state: str, cause: str) -> None:
        self._db.run(
            "UPDATE attempts SET state = ?, cause = ?, ended_at = ? WHERE id = ?",
            (state, cause, self._clock.now(), attempt),
        )

    # ------------------------------------------------------------ returning

    def _give_back(self, row: sqlite3.Row, cause: str, produced: int = 0) -> None:
        """The lease ends without a verdict on the episode: no attempt is used up."""
        self._end_attempt(row["attempt"], "returned", cause)
        self._nodes.add(row["node"], returned=1, produced=produced)
        self._db.run("UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL WHERE id = ?", (row["id"],))

    def _lose(self, row: sqlite3.Row, cause: str) -> None:
        """The lease is gone with its node: the task is played elsewhere, if it has not done that too often."""
        self._end_attempt(row["attempt"], "returned", cause)
        self._nodes.add(row["node"], returned=1)
        self._db.count(f"returned.{cause}")
        self._db.run("UPDATE tasks SET returns = returns + 1, cause = ? WHERE id = ?", (cause, row["id"]))
        self._retry_or_end(row, row["returns"] + 1 >= self._rules.most_returns)

    def expire(self) -> int:
        """Return the leases whose deadline has passed."""
        rows = self._db.all("SELECT * FROM tasks WHERE state = 'leased' AND deadline < ?", (self._clock.now(),))
        for row in rows:
            self._lose(row, "lease_expired")
        return len(rows)

    def lose_node(self, node: str, cause: str) -> int:
        """Return all leases of a node at once."""
        rows = self._db.all("SELECT * FROM tasks WHERE state = 'leased' AND node = ?", (node,))
        for row in rows:
            self._lose(row, cause)
        return len(rows)

    def give_all_back(self, cause: str) -> None:
        for row in self._db.all("SELECT * FROM tasks WHERE state = 'leased'"):
            self._give_back(row, cause)


def _why_failed(lane: str, news: CompleteTask) -> str:
    trained = news.calls if lane == "eval" else sum(sample.trained for sample in news.samples)
    if trained == 0:
        return NO_MODEL_CALL
    return "" if abs(news.reward) <= _LARGEST_REWARD else BAD_REWARD


def _sample_values(row: sqlite3.Row, number: int, sample: SampleMeta) -> tuple[str | int | float, ...]:
    place = sample.row
    return (
        *(f"{row['id']}.{number}", row["grp"], row["id"], number, sample.policy),
        *(place.unit, place.segment, place.offset, place.length),
        *(sample.tokens, sample.trained, sample.oldest, sample.newest),
        *(sample.reward, int(sample.truncated)),
    )
