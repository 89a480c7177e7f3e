"""Exact accounting, proved from the ledger's file: during a run, after it, after a crash.

Each identity compares two numbers that were counted in different ways. A run whose audit balances has lost nothing
and trained nothing twice on the line of weights that lives.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rillflow.dataflow.database import storage_error
from rillflow.dataflow.tables import ATTEMPT_STATES, GROUP_ENDED, GROUP_OPEN
from rillflow.errors import RunError


@dataclass(frozen=True)
class Identity:
    """Two numbers that must be equal."""

    name: str
    left: int
    right: int

    @property
    def ok(self) -> bool:
        return self.left == self.right


@dataclass
class AuditReport:
    identities: list[Identity] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        return all(identity.ok for identity in self.identities)

    def to_dict(self) -> dict[str, Any]:
        return {
            "balanced": self.balanced,
            "identities": [{**asdict(identity), "ok": identity.ok} for identity in self.identities],
            "counts": self.counts,
        }


def audit(path: Path) -> AuditReport:
    """Check the ledger at `path` as it was last committed."""
    if not path.is_file():
        raise RunError(f"there is no ledger {path}", "give the folder of a run that has been started")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")  # one snapshot for all queries
            return _Auditor(connection).report()
    except sqlite3.Error as error:
        raise storage_error(path, error) from error


class _Auditor:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._report = AuditReport()

    def report(self) -> AuditReport:
        for lane in ("train", "eval"):
            self._lane(lane)
        self._tally()
        self._tasks()
        self._samples()
        self._batches()
        self._versions()
        return self._report

    def _count(self, query: str) -> int:
        row = self._connection.execute(query).fetchone()
        return int(row[0] or 0) if row else 0

    def _same(self, name: str, left: str | int, right: str | int) -> None:
        self._report.identities.append(
            Identity(
                name,
                self._count(left) if isinstance(left, str) else left,
                self._count(right) if isinstance(right, str) else right,
            )
        )

    # ------------------------------------------------------------ prompts and groups

    def _lane(self, lane: str) -> None:
        """Every admitted prompt is in exactly one state."""
        states = dict(
            self._connection.execute("SELECT state, count(*) FROM groups WHERE lane = ? GROUP BY state", (lane,))
        )
        ended = sum(states.get(state, 0) for state in GROUP_ENDED)
        outstanding = sum(states.get(state, 0) for state in GROUP_OPEN)
        admitted = self._count(f"SELECT value FROM counters WHERE name = 'admitted.{lane}'")
        self._same(f"{lane}: admitted = ended + outstanding", admitted, ended + outstanding)
        self._same(f"{lane}: every prompt's state is a known one", sum(states.values()), ended + outstanding)
        self._report.counts |= {
            f"{lane}.admitted": admitted,
            f"{lane}.ended": ended,
            f"{lane}.outstanding": outstanding,
            **{f"{lane}.{state}": number for state, number in sorted(states.items())},
        }
        if lane == "train":
            self._same(
                "train: prompts taken = admitted + skipped",
                "SELECT value FROM counters WHERE name = 'cursor'",
                "SELECT sum(value) FROM counters WHERE name IN ('admitted.train', 'skipped')",
            )
            self._same("train: no prompt of training was evaluated", states.get("evaluated", 0), 0)
        else:
            trainable = sum(states.get(state, 0) for state in ("ready", "leased", "trained", "filtered"))
            self._same("eval: no held-out prompt was trained", trainable, 0)

    def _tally(self) -> None:
        """The running counts by cause equal a recount, and every bad end has a cause."""
        tallied = dict(
            ((lane, state, cause), n)
            for lane, state, cause, n in self._connection.execute("SELECT * FROM tally WHERE n != 0")
        )
        counted = dict(
            ((lane, state, cause), n)
            for lane, state, cause, n in self._connection.execute(
                "SELECT lane, state, cause, count(*) FROM groups GROUP BY lane, state, cause"
            )
        )
        wrong = {key for key in tallied.keys() | counted.keys() if tallied.get(key) != counted.get(key)}
        self._same("groups: running counts by cause differ from a recount", len(wrong), 0)
        self._same(
            "groups: filtered, expired or failed without a cause",
            "SELECT count(*) FROM groups WHERE state IN ('filtered', 'expired', 'failed') AND cause = ''",
            0,
        )
        for (lane, state, cause), number in sorted(counted.items()):
            if cause:
                self._report.counts[f"{lane}.{state}.{cause}"] = number

    # ------------------------------------------------------------ tasks and samples

    def _tasks(self) -> None:
        self._same("tasks = planned by their groups", "SELECT count(*) FROM tasks", "SELECT sum(planned) FROM groups")
        self._same(
            "tasks: open ones outside a playing group",
            "SELECT count(*) FROM tasks t JOIN groups g ON g.id = t.grp "
            "WHERE t.state IN ('pending', 'leased') AND g.state != 'playing'",
            0,
        )
        self._same(
            "groups: playing ones without an open task",
            "SELECT count(*) FROM groups g WHERE g.state = 'playing' AND NOT EXISTS "
            "(SELECT 1 FROM tasks t WHERE t.grp = g.id AND t.state IN ('pending', 'leased'))",
            0,
        )
        states = dict(self._connection.execute("SELECT state, count(*) FROM attempts GROUP BY state"))
        self._same(
            "attempts: leases = done + failed + returned + cancelled + held",
            "SELECT sum(leases) FROM tasks",
            sum(states.get(state, 0) for state in ATTEMPT_STATES),
        )
        self._same(
            "attempts: held = tasks leased", states.get("held", 0), "SELECT count(*) FROM tasks WHERE state = 'leased'"
        )
        self._same(
            "attempts: done = tasks done", states.get("done", 0), "SELECT count(*) FROM tasks WHERE state = 'done'"
        )
        self._same("attempts: failed = failures of tasks", states.get("failed", 0), "SELECT sum(failures) FROM tasks")
        self._same(
            "tasks: leased or done without the attempt that says so",
            "SELECT count(*) FROM tasks t LEFT JOIN attempts a ON a.id = t.attempt WHERE t.state IN ('leased', 'done') "
            "AND a.state IS NOT (CASE t.state WHEN 'leased' THEN 'held' ELSE 'done' END)",
            0,
        )
        self._report.counts |= {f"attempts.{state}": states.get(state, 0) for state in ATTEMPT_STATES}

    def _samples(self) -> None:
        self._same(
            "samples = samples of done tasks",
            "SELECT count(*) FROM samples",
            "SELECT sum(samples) FROM tasks WHERE state = 'done'",
        )
        self._same(
            "samples: those of no done task of their group",
            "SELECT count(*) FROM samples s LEFT JOIN tasks t ON t.id = s.task AND t.grp = s.grp "
            "WHERE t.state IS NOT 'done'",
            0,
        )
        self._same(
            "samples: done tasks with another number than they said",
            "SELECT count(*) FROM tasks t WHERE t.state = 'done' AND t.samples != "
            "(SELECT count(*) FROM samples s WHERE s.grp = t.grp AND s.task = t.id)",
            0,
        )
        self._report.counts["samples"] = self._count("SELECT count(*) FROM samples")

    # ------------------------------------------------------------ batches and versions

    def _batches(self) -> None:
        for group, batch in (("trained", "committed"), ("leased", "leased")):
            members = f"FROM batch_groups bg JOIN batches b ON b.id = bg.batch WHERE b.state = '{batch}'"
            self._same(
                f"groups {group} = groups in {batch} batches",
                f"SELECT count(*) FROM groups WHERE state = '{group}'",
                f"SELECT count(*) {members}",
            )
            self._same(
                f"groups in {batch} batches, each once and {group}",
                f"SELECT count(*) {members}",
                f"SELECT count(DISTINCT bg.grp) {members} AND EXISTS "
                f"(SELECT 1 FROM groups g WHERE g.id = bg.grp AND g.state = '{group}')",
            )
        self._same(
            "samples in committed batches = samples of their groups",
            "SELECT sum(samples) FROM batches WHERE state = 'committed'",
            "SELECT count(*) FROM batches b JOIN batch_groups bg ON bg.batch = b.id JOIN samples s ON s.grp = bg.grp "
            "WHERE b.state = 'committed'",
        )
        bound = self._count("SELECT value FROM meta WHERE key = 'staleness'")
        self._same(
            f"samples: trained beyond the staleness bound {bound}",
            "SELECT count(*) FROM batches b JOIN batch_groups bg ON bg.batch = b.id JOIN samples s ON s.grp = bg.grp "
            f"WHERE b.state = 'committed' AND s.trained > 0 AND b.version - s.oldest > {bound}",
            0,
        )

    def _versions(self) -> None:
        steps = self._count("SELECT sum(steps) FROM policies")
        self._same("steps = live versions", steps, "SELECT count(*) FROM steps WHERE state = 'live'")
        self._same("steps = committed batches", steps, "SELECT count(*) FROM batches WHERE state = 'committed'")
        self._same(
            "the policy stands at its newest live version",
            "SELECT max(version) FROM policies",
            "SELECT max(version) FROM steps WHERE state = 'live'",
        )
        self._same(
            "samples: trained on tokens of a version that died",
            "SELECT count(*) FROM batches b JOIN batch_groups bg ON bg.batch = b.id JOIN samples s ON s.grp = bg.grp "
            "JOIN orphans o ON o.low < s.newest AND s.oldest <= o.high WHERE b.state = 'committed' AND s.trained > 0",
            0,
        )
        self._report.counts |= {
            "steps": steps,
            "versions.orphaned": self._count("SELECT count(*) FROM steps WHERE state = 'orphaned'"),
            "rolled_back": self._count("SELECT value FROM counters WHERE name = 'rolled_back'"),
        }
