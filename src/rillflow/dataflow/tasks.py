"""Tasks: failed or given back by the attempt that holds them, retried a bounded number of times.

News from an attempt that no longer holds its task changes nothing. How one is completed: see `completions`.
"""

from __future__ import annotations

import json
import sqlite3

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rows import Rows
from rillflow.dataflow.user_errors import UserErrors
from rillflow.types import Ack, FailTask, SampleMeta

_ATTEMPT = (
    "SELECT t.*, a.state AS held, a.cause AS why, a.node AS holder "
    "FROM attempts a JOIN tasks t ON t.id = a.task WHERE a.id = ? AND a.task = ?"
)


class Tasks(Part):
    def __init__(self, base: Base, groups: Groups, nodes: Nodes, rows: Rows, errors: UserErrors) -> None:
        super().__init__(base)
        self._errors = errors
        self._groups = groups
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
    def any_pending(self) -> bool:
        return bool(self._db.value("SELECT EXISTS (SELECT 1 FROM tasks WHERE state = 'pending')"))

    @property
    def running(self) -> int:
        return int(self._db.value("SELECT count(*) FROM tasks WHERE state = 'leased'"))

    def renew(self, node: str, attempts: list[str]) -> list[str]:
        """Prolong the leases that the node still holds; returns the attempts whose lease is gone."""
        if not attempts:
            return []
        query = "SELECT a.* FROM json_each(?) j JOIN attempts a ON a.id = j.value"
        known = {row["id"]: row for row in self._db.all(query, (json.dumps(attempts),))}
        mine = {name for name, row in known.items() if row["state"] == "held" and row["node"] == node}
        deadline = self._clock.now() + self._rules.task_lease
        self._db.many("UPDATE tasks SET deadline = ? WHERE id = ?", [(deadline, known[name]["task"]) for name in mine])
        ended = {name for name, row in known.items() if row["state"] == "done"}
        return [attempt for attempt in attempts if attempt not in mine and attempt not in ended]

    # ------------------------------------------------------------ endings

    def refuse(self, row: sqlite3.Row | None, samples: list[SampleMeta]) -> Ack:
        """News of an attempt that does not hold its task, if there is such an attempt."""
        self._db.count("late")
        self._rows.note(sample.row for sample in samples)
        if row is None:
            return Ack(accepted=False, reason="there is no such attempt")
        self._nodes.refused(row["holder"], row["lane"], len(samples))
        return Ack(accepted=False, reason=f"the attempt was {row['held']}{': ' if row['why'] else ''}{row['why']}")

    def fail(self, news: FailTask) -> Ack:
        row = self._db.one(_ATTEMPT, (news.attempt, news.task))
        if row is not None and row["held"] == "failed":
            return Ack(accepted=True)
        if row is None or row["held"] != "held":
            return self.refuse(row, [])
        self._errors.add(news.errors)
        self.end_badly(row, news.cause[:200] or "unknown", news.error[:4000])
        return Ack(accepted=True)

    def end_badly(self, row: sqlite3.Row, cause: str, error: str, samples: int = 0, digest: str | None = None) -> None:
        """An attempt is used up; `digest` is that of the completion that told of it."""
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

    def give_back(self, row: sqlite3.Row, cause: str, samples: int = 0) -> None:
        """The lease ends without a verdict on the episode: no attempt is used up."""
        self._end_attempt(row["attempt"], "returned", cause)
        self._nodes.returned(row["node"], row["lane"], samples, stale=cause == "stale")
        self._db.run("UPDATE tasks SET state = 'pending', attempt = NULL, node = NULL WHERE id = ?", (row["id"],))

    def lose(self, row: sqlite3.Row, cause: str) -> None:
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
            self.lose(row, "lease_expired")
        return len(rows)

    def lose_node(self, node: str, cause: str) -> int:
        """Return all leases of a node at once; the groups that had their home there have none."""
        rows = self._db.all("SELECT * FROM tasks WHERE state = 'leased' AND node = ?", (node,))
        for row in rows:
            self.lose(row, cause)
        self.forsake(node)
        return len(rows)

    def give_node_back(self, node: str, cause: str) -> None:
        """A node that leaves hands back what it holds: nobody is to blame."""
        for row in self._db.all("SELECT * FROM tasks WHERE state = 'leased' AND node = ?", (node,)):
            self.give_back(row, cause)
            self._db.count(f"returned.{cause}")
        self.forsake(node)

    def forsake(self, node: str) -> None:
        """The groups that had their home at the node have none: anybody may go on with them."""
        for lane in ("train", "eval"):
            self._db.run("UPDATE tasks SET home = NULL WHERE state = 'pending' AND lane = ? AND home = ?", (lane, node))

    def give_all_back(self, cause: str) -> None:
        for row in self._db.all("SELECT * FROM tasks WHERE state = 'leased'"):
            self.give_back(row, cause)
