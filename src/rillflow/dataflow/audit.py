"""Exact accounting, proved from the ledger's file: during a run, after it, after a crash.

Each identity compares two numbers that were counted in different ways. A run whose audit balances has lost nothing
and trained nothing twice on the lines of weights that live.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rillflow.dataflow.ledger.database import snapshot
from rillflow.dataflow.ledger.payload import RECLAIMED
from rillflow.dataflow.ledger.states import MACHINES, Machine
from rillflow.dataflow.ledger.streams import ELSEWHERE
from rillflow.types.runs import owner_of


def _any(table: str, states: Sequence[str]) -> str:
    """An expression: whether a row of the group `g` is in one of these states."""
    named = ", ".join(f"'{state}'" for state in states)
    return f"EXISTS (SELECT 1 FROM {table} x WHERE x.grp = g.id AND x.state IN ({named}))"


_OPEN_TASK = _any("tasks", MACHINES["tasks"].open)
_OPEN_SHARE = _any("shares", MACHINES["shares"].open)
_TRAINED_SHARE = _any("shares", ["trained"])
_MEMBERS = "FROM members m JOIN batches b ON b.id = m.batch"
_SAMPLES = f"{_MEMBERS} JOIN samples s ON s.grp = m.grp AND s.policy = m.producer AND s.trained > 0"


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

    def as_json(self) -> dict[str, Any]:
        """The report in plain values."""
        return {
            "balanced": self.balanced,
            "identities": [{**asdict(identity), "ok": identity.ok} for identity in self.identities],
            "counts": self.counts,
        }


def audit(path: Path) -> AuditReport:
    """Check the ledger at `path` as it was last committed."""
    with snapshot(path) as reads:
        return examine(reads.connection)


def audit_all(paths: Sequence[Path]) -> AuditReport:
    """Check each ledger of a run, and that they agree. Most runs have one.

    Every step is in every ledger. It is committed to the first one last, so the others may be one step ahead.
    """
    if len(paths) == 1:
        return audit(paths[0])
    whole, counts, lines = AuditReport(), Counter[str](), []
    for number, path in enumerate(paths):
        with snapshot(path) as reads:
            one = examine(reads.connection)
            lines.append({row[0] for row in reads.connection.execute("SELECT version FROM steps WHERE state = 'live'")})
            prompts = reads.connection.execute("SELECT DISTINCT prompt FROM groups WHERE lane = 'train'")
            strangers = sum(owner_of(prompt, len(paths)) != number for (prompt,) in prompts)
        named = [*one.identities, Identity("prompts that belong to another ledger", strangers, 0)]
        whole.identities += [Identity(f"ledger {number}: {each.name}", each.left, each.right) for each in named]
        counts.update(one.counts)
    first, head = lines[0], max(lines[0], default=0)
    for number, line in enumerate(lines[1:], 1):
        under_way = min((version for version in line - first if version > head), default=head)
        whole.identities += [
            Identity(f"ledger {number}: steps of ledger 0 that are here", len(first & line), len(first)),
            Identity(f"ledger {number}: other steps than the one under way", len(line - first - {under_way}), 0),
        ]
    steps = {name: value for name, value in counts.items() if name == "steps" or name.endswith(".steps")}
    whole.counts = dict(counts) | {name: value // len(paths) for name, value in steps.items()}
    return whole


def examine(connection: sqlite3.Connection) -> AuditReport:
    """Check what this connection sees."""
    return _Auditor(connection).report()


class _Auditor:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._report = AuditReport()

    def report(self) -> AuditReport:
        for table, machine in MACHINES.items():
            self._states(table, machine)
        for lane in ("train", "eval"):
            self._lane(lane)
        self._tallies()
        self._tasks()
        self._attempts()
        self._samples()
        self._groups_and_shares()
        for stream in self._column("SELECT name FROM policies ORDER BY name"):
            self._stream(stream)
            self._versions(stream)
        self._stages()
        self._rows()
        return self._report

    def _count(self, query: str, values: Sequence[str | int] = ()) -> int:
        row = self._connection.execute(query, values).fetchone()
        return int(row[0] or 0) if row else 0

    def _column(self, query: str) -> list[str]:
        return [row[0] for row in self._connection.execute(query)]

    def _same(self, name: str, left: str | int, right: str | int, values: Sequence[str | int] = ()) -> None:
        """`values` fill both queries, where both are queries."""
        self._report.identities.append(
            Identity(
                name,
                self._count(left, values) if isinstance(left, str) else left,
                self._count(right, values) if isinstance(right, str) else right,
            )
        )

    def _none(self, name: str, query: str, values: Sequence[str | int] = ()) -> None:
        self._same(name, query, 0, values)

    # ------------------------------------------------------------ states

    def _states(self, table: str, machine: Machine) -> None:
        """Every row is in a state of the table of states, and says why where that is asked for."""
        known = ", ".join(f"'{state}'" for state in machine.states)
        self._none(f"{table}: in no known state", f"SELECT count(*) FROM {table} WHERE state NOT IN ({known})")
        if machine.caused:
            caused = ", ".join(f"'{state}'" for state in machine.caused)
            self._none(
                f"{table}: {', '.join(machine.caused)} without a cause",
                f"SELECT count(*) FROM {table} WHERE state IN ({caused}) AND cause = ''",
            )

    # ------------------------------------------------------------ prompts and groups

    def _lane(self, lane: str) -> None:
        """Every admitted prompt is in exactly one state."""
        states = dict(
            self._connection.execute("SELECT state, count(*) FROM groups WHERE lane = ? GROUP BY state", (lane,))
        )
        ended = sum(states.get(state, 0) for state in MACHINES["groups"].ends)
        outstanding = sum(states.get(state, 0) for state in MACHINES["groups"].open)
        admitted = self._count(f"SELECT value FROM counters WHERE name = 'admitted.{lane}'")
        self._same(f"{lane}: admitted = ended + outstanding", admitted, ended + outstanding)
        self._same(f"{lane}: groups = ended + outstanding", sum(states.values()), ended + outstanding)
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
                f"SELECT sum(value) FROM counters WHERE name IN ('admitted.train', 'skipped', '{ELSEWHERE}')",
            )
            self._same("train: no prompt of training was evaluated", states.get("evaluated", 0), 0)
        else:
            trainable = sum(states.get(state, 0) for state in ("open", "trained", "filtered"))
            self._same("eval: no held-out prompt was trained", trainable, 0)

    def _tallies(self) -> None:
        """The running counts by cause equal a recount."""
        for table, key, tally in (("groups", "lane", "tally"), ("shares", "stream", "share_tally")):
            tallied = _by_cause(self._connection.execute(f"SELECT * FROM {tally} WHERE n != 0"))
            counted = _by_cause(
                self._connection.execute(
                    f"SELECT {key}, state, cause, count(*) FROM {table} GROUP BY {key}, state, cause"
                )
            )
            wrong = {at for at in tallied.keys() | counted.keys() if tallied.get(at) != counted.get(at)}
            self._same(f"{table}: running counts by cause differ from a recount", len(wrong), 0)
            for (first, state, cause), number in sorted(counted.items()):
                if cause or table == "shares":
                    name = f"{first}.{state}.{cause}" if cause else f"{first}.{state}"
                    self._report.counts[name if table == "groups" else f"shares.{name}"] = number

    # ------------------------------------------------------------ tasks, attempts and samples

    def _tasks(self) -> None:
        self._same("tasks = planned by their groups", "SELECT count(*) FROM tasks", "SELECT sum(planned) FROM groups")
        self._none(
            "tasks: open ones outside a playing group",
            "SELECT count(*) FROM tasks t JOIN groups g ON g.id = t.grp "
            "WHERE t.state IN ('pending', 'leased') AND g.state != 'playing'",
        )
        self._none(
            "groups: playing ones without an open task",
            f"SELECT count(*) FROM groups g WHERE g.state = 'playing' AND g.scoring = 0 AND NOT {_OPEN_TASK}",
        )
        self._none(
            "groups: waiting for their group's reward, but with an open task or an end",
            f"SELECT count(*) FROM groups g WHERE g.scoring = 1 AND (g.state != 'playing' OR {_OPEN_TASK})",
        )
        self._report.counts["trajectories"] = self._count("SELECT count(*) FROM tasks WHERE state = 'done'")

    def _attempts(self) -> None:
        states = dict(self._connection.execute("SELECT state, count(*) FROM attempts GROUP BY state"))
        known = MACHINES["attempts"].states
        self._same(
            f"attempts: leases = {' + '.join(known)}",
            "SELECT sum(leases) FROM tasks",
            sum(states.get(state, 0) for state in known),
        )
        self._same("attempts: held = held by nodes", states.get("held", 0), "SELECT sum(held) FROM nodes")
        self._same("attempts: failed = failures of tasks", states.get("failed", 0), "SELECT sum(failures) FROM tasks")
        self._none(
            "tasks: leased or done, but not by the latest attempt, or by one that has ended otherwise",
            "SELECT count(*) FROM tasks WHERE state IN ('leased', 'done') AND (attempt IS NOT id || '-' || leases "
            "OR node IS NULL OR leased_at IS NULL OR attempt IN (SELECT id FROM ended_attempts))",
        )
        self._none(
            "tasks: done without the digest and the time of their completion",
            "SELECT count(*) FROM tasks WHERE state = 'done' AND (digest IS NULL OR ended_at IS NULL)",
        )
        self._report.counts |= {f"attempts.{state}": states.get(state, 0) for state in known}

    def _samples(self) -> None:
        self._same(
            "samples = samples of done tasks",
            "SELECT count(*) FROM samples",
            "SELECT sum(samples) FROM tasks WHERE state = 'done'",
        )
        self._none(
            "samples: those of no done task of their group",
            "SELECT count(*) FROM samples s LEFT JOIN tasks t ON t.grp = s.grp AND t.place = s.place "
            "WHERE t.state IS NOT 'done'",
        )
        self._none(
            "samples: done tasks with another number than they said",
            "SELECT count(*) FROM tasks t WHERE t.state = 'done' AND t.samples != "
            "(SELECT count(*) FROM samples s WHERE s.grp = t.grp AND s.place = t.place)",
        )
        self._report.counts["samples"] = self._count("SELECT count(*) FROM samples")

    # ------------------------------------------------------------ shares

    def _groups_and_shares(self) -> None:
        """A group is as far as its shares are."""
        self._none(
            "groups: open, but no share of them is; or the other way round",
            f"SELECT count(*) FROM groups g WHERE lane = 'train' AND (state = 'open') != {_OPEN_SHARE}",
        )
        self._none(
            "groups: trained, but no share of them is; or ended otherwise, but one is",
            f"SELECT count(*) FROM groups g WHERE lane = 'train' AND state != 'open' "
            f"AND (state = 'trained') != {_TRAINED_SHARE}",
        )
        self._none(
            "shares: of no group of training",
            "SELECT count(*) FROM shares s LEFT JOIN groups g ON g.id = s.grp WHERE g.lane IS NOT 'train'",
        )
        self._none(
            "shares: with another number of samples than they said",
            "SELECT count(*) FROM shares h WHERE h.state IN ('ready', 'leased', 'trained') AND h.samples != "
            "(SELECT count(*) FROM samples s WHERE s.grp = h.grp AND s.policy = h.producer AND s.trained > 0)",
        )
        self._report.counts["shares"] = self._count("SELECT count(*) FROM shares")

    def _stream(self, stream: str) -> None:
        """Check that each trained or leased share is a fresh member of exactly one batch in the same state."""
        for state, batch in (("trained", "committed"), ("leased", "leased")):
            members = f"{_MEMBERS} WHERE b.policy = ? AND b.state = '{batch}' AND m.replayed = 0"
            self._same(
                f"{stream}: shares {state} = fresh members of {batch} batches",
                f"SELECT count(*) FROM shares WHERE stream = ? AND state = '{state}'",
                f"SELECT count(*) {members}",
                (stream,),
            )
            self._same(
                f"{stream}: fresh members of {batch} batches, each once and {state} there",
                f"SELECT count(*) {members}",
                f"SELECT count(*) FROM (SELECT DISTINCT m.grp, m.producer {members} AND EXISTS (SELECT 1 FROM shares s "
                f"WHERE s.grp = m.grp AND s.producer = m.producer AND s.stream = b.policy AND s.state = '{state}' "
                "AND s.batch = b.id))",
                (stream,),
            )
        self._same(
            f"{stream}: samples in committed batches = samples of their members",
            "SELECT sum(samples) FROM batches WHERE policy = ? AND state = 'committed'",
            f"SELECT count(*) {_SAMPLES} WHERE b.policy = ? AND b.state = 'committed'",
            (stream,),
        )
        self._same(
            f"{stream}: members of committed batches = as many as they say, and complete",
            "SELECT sum(members * complete) FROM batches WHERE policy = ? AND state = 'committed'",
            f"SELECT count(*) {_MEMBERS} WHERE b.policy = ? AND b.state = 'committed'",
            (stream,),
        )
        self._bounds(stream)
        for what, replayed in (("fresh", 0), ("replayed", 1)):
            self._report.counts[f"{stream}.members.{what}"] = self._count(
                f"SELECT count(*) {_MEMBERS} WHERE b.policy = ? AND b.state = 'committed' AND m.replayed = ?",
                (stream, replayed),
            )

    def _bounds(self, stream: str) -> None:
        bounds = json.loads((self._column("SELECT value FROM meta WHERE key = 'staleness'") or ["{}"])[0])
        replay = self._count("SELECT value FROM meta WHERE key = 'replay_staleness'")
        for what, replayed, bound in (("trained", 0, bounds.get(stream, 0)), ("replayed", 1, replay)):
            self._none(
                f"{stream}: samples {what} beyond the staleness bound {bound}",
                f"SELECT count(*) {_SAMPLES} WHERE b.policy = ? AND b.state = 'committed' AND m.replayed = ? "
                "AND max(m.head, CASE WHEN m.producer = b.policy THEN b.version ELSE 0 END) - s.oldest > ?",
                (stream, replayed, bound),
            )

    # ------------------------------------------------------------ versions

    def _versions(self, policy: str) -> None:
        steps = self._count("SELECT steps FROM policies WHERE name = ?", (policy,))
        live = "FROM steps WHERE policy = ? AND state = 'live'"
        self._same(f"{policy}: steps = live versions", steps, self._count(f"SELECT count(*) {live}", (policy,)))
        committed = "SELECT count(*) FROM batches WHERE policy = ? AND state = 'committed'"
        self._same(f"{policy}: steps = committed batches", steps, self._count(committed, (policy,)))
        self._same(
            f"{policy}: it stands at its newest live version",
            "SELECT version FROM policies WHERE name = ?",
            f"SELECT max(version) {live}",
            (policy,),
        )
        self._none(
            f"{policy}: samples of a version of its own that died were trained",
            f"SELECT count(*) {_SAMPLES} JOIN orphans o ON o.policy = s.policy AND o.low < s.newest "
            "AND s.oldest <= o.high WHERE b.policy = ? AND m.producer = b.policy AND b.state = 'committed'",
            (policy,),
        )
        orphaned = "SELECT count(*) FROM steps WHERE policy = ? AND state = 'orphaned'"
        self._report.counts |= {
            "steps": self._report.counts.get("steps", 0) + steps,
            f"{policy}.steps": steps,
            "versions.orphaned": self._report.counts.get("versions.orphaned", 0) + self._count(orphaned, (policy,)),
            "rolled_back": self._count("SELECT value FROM counters WHERE name = 'rolled_back'"),
        }

    # ------------------------------------------------------------ stages and rows

    def _stages(self) -> None:
        self._none(
            "stages: leased shares outside a leased batch of a stage, or shares that are not ready",
            "SELECT count(*) FROM stage_shares d LEFT JOIN stage_batches b ON b.id = d.batch LEFT JOIN shares s "
            "ON s.grp = d.grp AND s.producer = d.producer AND s.stream = d.stream "
            "WHERE d.state = 'leased' AND (b.state IS NOT 'leased' OR s.state IS NOT 'ready')",
        )
        self._none(
            "stages: shares that went to the trainer before all stages had handled them",
            "SELECT count(*) FROM shares WHERE state = 'leased' AND todo != 0",
        )

    def _rows(self) -> None:
        """Rows that may be asked for are counted where they lie, and nothing else is."""
        counted = {(unit, segment): n for unit, segment, n in self._connection.execute(_ROWS_COUNTED)}
        told = {
            (unit, segment): n
            for unit, segment, n in self._connection.execute("SELECT unit, segment, live FROM segments WHERE live != 0")
        }
        wrong = {at for at in counted.keys() | told.keys() if counted.get(at) != told.get(at)}
        self._same("segments: live rows differ from a recount", len(wrong), 0)
        self._none(
            "segments: dropped, or being dropped, though rows in them may be asked for",
            "SELECT count(*) FROM segments WHERE state != 'live' AND live != 0",
        )
        self._none(
            "samples: of held shares, but released",
            "SELECT count(*) FROM shares h JOIN samples s ON s.grp = h.grp AND s.policy = h.producer AND s.trained > 0 "
            "WHERE h.held = 1 AND s.live = 0",
        )
        self._none(
            "samples: kept, though nobody may ask for them",
            "SELECT count(*) FROM samples s JOIN groups g ON g.id = s.grp WHERE s.live = 1 AND g.state != 'playing' "
            "AND NOT EXISTS (SELECT 1 FROM shares h WHERE h.grp = s.grp AND h.producer = s.policy AND h.held = 1) "
            "AND NOT (g.lane = 'eval' AND EXISTS "
            "(SELECT 1 FROM rounds r WHERE r.id = g.round AND r.state = 'running'))",
        )
        self._none(
            "shares: open, but not held",
            "SELECT count(*) FROM shares WHERE state IN ('ready', 'leased') AND held = 0",
        )
        self._same(
            "quarantine = rows counted as set aside",
            "SELECT count(*) FROM quarantine",
            "SELECT value FROM counters WHERE name = 'quarantined'",
        )
        self._same(
            "segments: dropped unreported = counted as reclaimed",
            "SELECT count(*) FROM segments WHERE state = 'dropped' AND unreported IS NOT NULL",
            f"SELECT value FROM counters WHERE name = '{RECLAIMED}'",
        )
        self._report.counts |= {
            "segments.reclaimed": self._count(f"SELECT value FROM counters WHERE name = '{RECLAIMED}'"),
            "rows.live": sum(counted.values()),
            "quarantined": self._count("SELECT count(*) FROM quarantine"),
        }


_ROWS_COUNTED = (
    "SELECT unit, segment, count(*) FROM (SELECT unit, segment FROM samples WHERE live = 1 "
    "UNION ALL SELECT unit, segment FROM extras) GROUP BY unit, segment"
)


def _by_cause(rows: sqlite3.Cursor) -> dict[tuple[str, str, str], int]:
    return {(first, state, cause): number for first, state, cause, number in rows}
