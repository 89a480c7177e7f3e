"""Tasks: completed by the attempt that holds them, retried a bounded number of times.

News from an attempt that no longer holds its task changes nothing; the same news twice is taken once; other news
under an attempt that was completed is refused.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3

import msgspec

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rows import Rows
from rillflow.dataflow.tables import NEWEST
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import Ack, CompleteTask, FailTask, SampleMeta

# A completion that counts as a failure of the episode: there is nothing in it to train on, or no reward.
NO_MODEL_CALL, BAD_REWARD = "no_model_call", "bad_reward"
PAYLOAD_GONE = "payload_gone"
_MOST_TOKENS = 1 << 31  # of one sample: sums over a group stay within 64 bits
_LARGEST_REWARD = 3.4e38  # a trainer's numbers have 32 bits; statistics of larger ones are no numbers
# What most completions need to know, in one statement: the attempt and its task, and what may follow from its end.
_ATTEMPT = (
    "SELECT t.*, a.state AS held, a.cause AS why, a.node AS holder, a.digest, "
    "EXISTS (SELECT 1 FROM orphans) AS deaths, EXISTS "
    "(SELECT 1 FROM tasks o WHERE o.grp = t.grp AND o.id != t.id AND o.state IN ('pending', 'leased')) AS others, "
    "ifnull((SELECT value FROM counters WHERE name = 'failures_in_a_row'), 0) AS bad_row "
    "FROM attempts a JOIN tasks t ON t.id = a.task WHERE a.id = ? AND a.task = ?"
)
_VERSIONS = (
    "INSERT INTO group_versions VALUES (?, ?, ?, ?) ON CONFLICT (grp, producer) DO UPDATE SET "
    "oldest = min(oldest, excluded.oldest), newest = max(newest, excluded.newest)"
)


class Tasks(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes, rows: Rows) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes
        self._rows = rows

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
        return self._db.one(_ATTEMPT, (attempt, task))

    def _refused(self, row: sqlite3.Row | None, samples: list[SampleMeta]) -> Ack:
        self._db.count("late")
        self._rows.note(sample.row for sample in samples)
        if row is None:
            return Ack(accepted=False, reason="there is no such attempt")
        self._nodes.refused(row["holder"], row["lane"], len(samples))
        return Ack(accepted=False, reason=f"the attempt was {row['held']}{': ' if row['why'] else ''}{row['why']}")

    def complete(self, news: CompleteTask) -> Ack:
        self._check(news)
        row, digest = self._attempt(news.task, news.attempt), _digest(news)
        if row is not None and (row["held"] == "done" or row["why"] in (NO_MODEL_CALL, BAD_REWARD)):
            if row["digest"] != digest:
                raise LeaseLost(
                    f"attempt {news.attempt!r:.80} was completed before, with another payload",
                    "an attempt is completed once: check that no two processes play under one name",
                )
            return Ack(accepted=True, reason=row["why"])
        if row is None or row["held"] != "held":
            return self._refused(row, news.samples)
        if cause := self._why_again(row, news.samples):
            return self._play_again(row, cause, news)
        if cause := _why_failed(row["lane"], news):
            self._rows.note(sample.row for sample in news.samples)
            error = f"reward {news.reward}, {news.calls} model calls"
            self._fail(row, cause, error, samples=len(news.samples), digest=digest)
            return Ack(accepted=True, reason=cause)
        wanted = [self._wanted(row["lane"], sample) for sample in news.samples]
        if not self._rows.take(sample.row for sample, live in zip(news.samples, wanted, strict=True) if live):
            self._lose(row, PAYLOAD_GONE)  # as with its node: a node that writes to nowhere must not do so for ever
            return Ack(accepted=False, reason=f"{PAYLOAD_GONE}: the task is played again")
        if not all(wanted):
            self._rows.note(sample.row for sample in news.samples)
        self._done(row, news, wanted, digest)
        return Ack(accepted=True)

    def _play_again(self, row: sqlite3.Row, cause: str, news: CompleteTask) -> Ack:
        self._rows.note(sample.row for sample in news.samples)
        self._give_back(row, cause, samples=len(news.samples))
        self._db.count(f"rerun.{cause}")
        return Ack(accepted=False, reason=f"{cause}: the task is played again")

    def _wanted(self, lane: str, sample: SampleMeta) -> bool:
        """Whether anybody may ask for the sample: a stream, or whoever looks at an evaluation."""
        return lane == "eval" or (sample.trained > 0 and bool(self._rules.streams_of(sample.policy)))

    def _check(self, news: CompleteTask) -> None:
        """Refuse what cannot be written down before anything is: others' completions share the transition."""
        places = [number for s in news.samples for number in (s.row.segment, s.row.offset, s.row.length)]
        if not all(0 <= number <= NEWEST for number in (news.calls, *places)):
            raise BadRequest(f"a number of {news.task!r:.80} is out of range", "64 bits, signed, are the limit")
        for sample in news.samples:
            self._lineage.check_policy(sample.policy)
            whole = 0 <= sample.trained <= sample.tokens <= _MOST_TOKENS and (
                sample.trained == 0 or 0 <= sample.oldest <= sample.newest <= NEWEST
            )
            if not whole or not math.isfinite(sample.reward):
                raise BadRequest(f"a sample of {news.task!r:.80} contradicts itself: {sample}", "check the node")

    def _why_again(self, row: sqlite3.Row, samples: list[SampleMeta]) -> str:
        """Why an episode that ended well must be played again, if so: its versions are dead, or not on-policy."""
        trained = [sample for sample in samples if sample.trained]
        if row["deaths"] and any(self._lineage.died(s.policy, s.oldest, s.newest) for s in trained):
            return "rolled_back"
        if row["lane"] == "train" and self._rules.on_policy:
            heads = self._lineage.heads
            if any(s.oldest < heads[s.policy] and self._on_policy(s.policy) for s in trained):
                return "stale"
        return ""

    def _on_policy(self, producer: str) -> bool:
        unfinished = self._lineage.unfinished()
        return any(
            self._rules.policies[stream].on_policy
            for stream in self._rules.streams_of(producer)
            if stream in unfinished
        )

    def _done(self, row: sqlite3.Row, news: CompleteTask, live: list[bool], digest: str) -> None:
        self._end_attempt(row["attempt"], "done", "", digest)
        metrics = msgspec.json.encode(news.metrics).decode()
        self._db.run(
            "UPDATE tasks SET state = 'done', cause = '', error = '', reward = ?, samples = ?, calls = ?, "
            "seconds = ?, metrics = ? WHERE id = ?",
            (news.reward, len(news.samples), news.calls, news.seconds, metrics, news.task),
        )
        self._db.many(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_sample_values(row, n, sample, live[n]) for n, sample in enumerate(news.samples)],
        )
        if row["lane"] == "train":
            self._db.many(_VERSIONS, [(row["grp"], s.policy, s.oldest, s.newest) for s in news.samples if s.trained])
        self._nodes.succeeded(row["holder"], row["lane"], news.seconds, len(news.samples))
        if row["bad_row"]:
            self._db.clear_counter("failures_in_a_row")
        if not row["others"]:
            self._groups.settle(row["grp"])

    def fail(self, news: FailTask) -> Ack:
        row = self._attempt(news.task, news.attempt)
        if row is not None and row["held"] == "failed":
            return Ack(accepted=True)
        if row is None or row["held"] != "held":
            return self._refused(row, [])
        self._fail(row, news.cause[:200] or "unknown", news.error[:4000])
        return Ack(accepted=True)

    def _fail(self, row: sqlite3.Row, cause: str, error: str, samples: int = 0, digest: str | None = None) -> None:
        self._end_attempt(row["attempt"], "failed", cause, digest)
        self._nodes.failed(row["holder"], row["lane"], samples)
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

    def _end_attempt(self, attempt: str, state: str, cause: str, digest: str | None = None) -> None:
        self._db.run(
            "UPDATE attempts SET state = ?, cause = ?, digest = ?, ended_at = ? WHERE id = ?",
            (state, cause, digest, self._clock.now(), attempt),
        )

    # ------------------------------------------------------------ returning

    def _give_back(self, row: sqlite3.Row, cause: str, samples: int = 0) -> None:
        """The lease ends without a verdict on the episode: no attempt is used up."""
        self._end_attempt(row["attempt"], "returned", cause)
        self._nodes.returned(row["node"], row["lane"], samples, stale=cause == "stale")
        self._db.run("UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL WHERE id = ?", (row["id"],))

    def _lose(self, row: sqlite3.Row, cause: str) -> None:
        """The lease is gone with its node: the task is played elsewhere, if it has not done that too often."""
        self._end_attempt(row["attempt"], "returned", cause)
        self._nodes.returned(row["node"], row["lane"])
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
        """Return all leases of a node at once; the groups that had their home there have none."""
        rows = self._db.all("SELECT * FROM tasks WHERE state = 'leased' AND node = ?", (node,))
        for row in rows:
            self._lose(row, cause)
        for lane in ("train", "eval"):
            self._db.run("UPDATE tasks SET home = NULL WHERE state = 'pending' AND lane = ? AND home = ?", (lane, node))
        return len(rows)

    def give_all_back(self, cause: str) -> None:
        for row in self._db.all("SELECT * FROM tasks WHERE state = 'leased'"):
            self._give_back(row, cause)


def _why_failed(lane: str, news: CompleteTask) -> str:
    trained = news.calls if lane == "eval" else sum(sample.trained for sample in news.samples)
    if trained == 0:
        return NO_MODEL_CALL
    rewards = [news.reward, *(sample.reward for sample in news.samples)]
    return "" if all(abs(reward) <= _LARGEST_REWARD for reward in rewards) else BAD_REWARD


def _digest(news: CompleteTask) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(news), digest_size=8).hexdigest()


def _sample_values(row: sqlite3.Row, number: int, sample: SampleMeta, live: bool) -> tuple[str | int | float, ...]:
    place = sample.row
    return (
        *(row["grp"], row["place"], number, sample.policy),
        *(place.unit, place.segment, place.offset, place.length),
        *(sample.tokens, sample.trained, sample.oldest, sample.newest),
        *(sample.reward, int(sample.truncated), int(live)),
    )
