"""Rollout nodes as the ledger knows them, and the errors of user code that they report.

A row says when a node last called, which versions it serves, how much it has produced and whether it leaves. A node
that leaves gets no more tasks, and the tasks that it returns use up no attempt. A process that comes under the name of
one that has left is a new node. The last nodes that have gone are kept; all others that have gone and hold nothing are
summed up in one row, so that neither a lease nor a report costs more the more nodes have come and gone.

The only writer of nodes, retired and user_errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from rillflow.dataflow.ledger.database import Part
from rillflow.dataflow.ledger.tables import SUM, Node
from rillflow.errors import BadRequest
from rillflow.types import Heartbeat, NodeInfo, UserError

_PACE = 0.8  # of the mean seconds that is kept at every success
_LONGEST = 1e9  # seconds; whatever a node says, the mean stays a number
_DECAY = 0.95  # of what is remembered at every ending: about the last 20 count
_SHORTEST = 1e-3  # seconds; bounds the speed of a node
_RATE_SECONDS = 30.0  # over which samples a second are counted, roughly
_GONE_SHOWN = 3600.0  # seconds that a node which is gone is listed
_MOST_GONE = 64  # nodes which are gone that are kept apart from the sum
_COUNTS = ("leased", "completed", "refused", "failed", "returned", "produced", "accepted", "consumed", "stale")
TAKING = "state = 'healthy' AND leaving = 0 AND active = 'rollout'"


class Nodes(Part):
    def grace(self) -> None:
        """Give every healthy node its full time to be heard of again."""
        self._db.run("UPDATE nodes SET seen = ? WHERE state = 'healthy'", (self._clock.now(),))

    def retired(self, node: str, incarnation: str) -> bool:
        """Return whether this process is one that another has replaced under the same name."""
        return bool(self._db.value("SELECT 1 FROM retired WHERE node = ? AND incarnation = ?", (node, incarnation)))

    def find(self, node: str) -> Node | None:
        return self._db.row(Node, f"SELECT {Node.columns()} FROM nodes WHERE name = ?", (node,))

    def hear(self, node: str, incarnation: str, versions: Mapping[str, int]) -> bool:
        """Note that the node lives; returns True when a new process took the node's name."""
        if not node or len(node) > 200:
            raise BadRequest("a node's name has 1 to 200 characters", "give every node a short name of its own")
        before = self._db.value("SELECT incarnation FROM nodes WHERE name = ?", (node,))
        known = {policy: versions[policy] for policy in self._rules.policies if policy in versions}
        values = (self._clock.now(), versions.get(self._rules.policy), json.dumps(known))
        if before is None:
            self._db.run(
                "INSERT INTO nodes (name, incarnation, state, seen, version, versions) "
                "VALUES (?, ?, 'healthy', ?, ?, ?)",
                (node, incarnation, *values),
            )
            return False
        self._db.run(
            "UPDATE nodes SET incarnation = ?, state = 'healthy', seen = ?, version = ?, versions = ? WHERE name = ?",
            (incarnation, *values, node),
        )
        if before == incarnation:
            return False
        self._db.run("INSERT OR IGNORE INTO retired VALUES (?, ?)", (node, before))
        # Another process: the record of the one before it says nothing of this one.
        self._db.run(
            "UPDATE nodes SET ends = 0, bad_ends = 0, bad_row = 0, pace = NULL, made = 0, busy = 0, ended_at = NULL, "
            "rate = 0, rate_at = NULL, leaving = 0, leave_at = NULL, drain = NULL WHERE name = ?",
            (node,),
        )
        return True

    def describe(self, beat: Heartbeat) -> float | None:
        """Write down a heartbeat's facts; returns the seconds that a retired node has left, None for one that stays."""
        node = self.find(beat.node)
        assert node is not None, "heard of before"
        now = self._clock.now()
        self._db.run(
            "UPDATE nodes SET capacity = ?, stats = ?, active = ?, leaving = max(leaving, ?), rate = ?, rate_at = ?, "
            "rate_accepted = ? WHERE name = ?",
            (
                *(beat.capacity, json.dumps(beat.stats), beat.active[:100], beat.leaving),
                *(_rate(node, now), now, node.accepted, beat.node),
            ),
        )
        return self._seconds_left(node)

    # ------------------------------------------------------------ leaving

    def retire(self, node: str, drain: float) -> None:
        """Tell the node to leave within `drain` seconds. Of several calls the earliest end counts."""
        row = self.find(node)
        if row is None or row.state != "healthy":
            known = "is not there any more" if row is not None else "was never heard of"
            raise BadRequest(f"node {node!r:.80} {known}", "`rillflow nodes RUN` lists those that are there")
        if not 0 <= drain <= _LONGEST:
            raise BadRequest(f"a node cannot leave within {drain} seconds", "give 0 or more")
        until = self._clock.now() + drain
        if row.leave_at is None or until < row.leave_at:
            self._db.run("UPDATE nodes SET leaving = 1, leave_at = ?, drain = ? WHERE name = ?", (until, drain, node))

    def leave_in(self, node: str) -> float | None:
        """Return the seconds that a retired node has left; None for one that stays."""
        row = self.find(node)
        return None if row is None else self._seconds_left(row)

    def _seconds_left(self, node: Node) -> float | None:
        if node.leave_at is None or node.drain is None:
            return None
        # Not more than it was given: the clock may have been set back.
        return max(0.0, min(node.leave_at - self._clock.now(), node.drain))

    def leave(self, node: str, incarnation: str) -> None:
        """Mark this process of the node as left."""
        self._db.run("INSERT OR IGNORE INTO retired VALUES (?, ?)", (node, incarnation))
        self._db.run("UPDATE nodes SET state = 'left', leaving = 1 WHERE name = ?", (node,))

    def overdue(self) -> list[tuple[str, str]]:
        """Return names and incarnations of retired nodes that are still heard of after their time."""
        return self._db.all(
            "SELECT name, incarnation FROM nodes WHERE state = 'healthy' AND leave_at < ?",
            (self._clock.now() - self._rules.node_timeout,),
        )

    def silent(self) -> list[str]:
        """Mark the nodes that were not heard of for too long as gone; returns their names."""
        names: list[str] = self._db.column(
            "SELECT name FROM nodes WHERE state = 'healthy' AND seen < ?",
            (self._clock.now() - self._rules.node_timeout,),
        )
        self._db.many("UPDATE nodes SET state = 'gone' WHERE name = ?", [(name,) for name in names])
        return names

    def sum_up(self) -> None:
        """Add the nodes that went long ago, and all but the latest of the others that are gone, to one row."""
        gone = "FROM nodes WHERE state != 'healthy' AND held = 0 AND name != ?"
        last = self._db.value(f"SELECT seen {gone} ORDER BY seen DESC LIMIT 1 OFFSET ?", (SUM, _MOST_GONE))
        until = max(last or 0.0, self._clock.now() - _GONE_SHOWN)
        found = self._db.column(f"SELECT name {gone} AND seen <= ?", (SUM, until))
        if not found:
            return
        names, these = json.dumps(found), "IN (SELECT value FROM json_each(?))"
        self._db.run(
            f"INSERT OR REPLACE INTO nodes (name, incarnation, state, seen, {', '.join(_COUNTS)}) "
            f"SELECT ?, '', 'gone', max(seen), {', '.join(f'sum({name})' for name in _COUNTS)} FROM nodes "
            f"WHERE name = ? OR name {these}",
            (SUM, SUM, names),
        )
        self._db.run(f"DELETE FROM nodes WHERE name {these}", (names,))
        self._db.run(f"DELETE FROM retired WHERE node {these}", (names,))

    # ------------------------------------------------------------ counting

    def leased(self, node: str, train: int, evaluation: int) -> None:
        self._db.run(
            "UPDATE nodes SET held = held + ?, held_eval = held_eval + ?, leased = leased + ? WHERE name = ?",
            (train + evaluation, evaluation, train + evaluation, node),
        )

    def succeeded(self, node: str, lane: str, ends: Sequence[tuple[float, int]]) -> None:
        """Count episodes that ended well, given the seconds and samples of each. Samples count in the train lane."""
        number, train = len(ends), lane == "train"
        counted = sum(samples for _, samples in ends) if train else 0
        took = [min(max(seconds, 0.0), _LONGEST) for seconds, _ in ends]
        pace, first, made, busy, weight = 0.0, took[0], 0.0, 0.0, 0.0
        for seconds, (_, samples) in zip(took, ends, strict=True):
            pace, first = pace * _PACE + (1 - _PACE) * seconds, first * _PACE + (1 - _PACE) * seconds
            made, busy = made * _DECAY + samples, busy * _DECAY + max(seconds, _SHORTEST)
            weight = weight * _DECAY + 1
        decay = _DECAY**number
        self._db.run(
            "UPDATE nodes SET held = held - ?, held_eval = held_eval - ?, ends = ends * ? + ?, "
            "bad_ends = bad_ends * ?, bad_row = 0, pace = CASE WHEN pace IS NULL THEN ? ELSE pace * ? + ? END, "
            "made = made * ? + ?, busy = busy * ? + ?, ended_at = ?, completed = completed + ?, "
            "produced = produced + ?, accepted = accepted + ? WHERE name = ?",
            (
                *(number, 0 if train else number, decay, weight, decay),
                *(first, _PACE**number, pace, decay, made, decay, busy, self._clock.now()),
                *(number, counted, counted, node),
            ),
        )

    def failed(self, node: str, lane: str, samples: int) -> None:
        """Count an episode that ended badly."""
        train = lane == "train"
        self._db.run(
            "UPDATE nodes SET held = held - 1, held_eval = held_eval - ?, ends = ends * ? + 1, "
            "bad_ends = bad_ends * ? + 1, bad_row = bad_row + 1, ended_at = ?, failed = failed + 1, "
            "produced = produced + ? WHERE name = ?",
            (not train, _DECAY, _DECAY, self._clock.now(), samples if train else 0, node),
        )

    def returned(self, node: str, lane: str, samples: int = 0, *, stale: bool = False) -> None:
        """Count a lease that ended without a verdict on the episode."""
        produced = samples if lane == "train" else 0
        self._db.run(
            "UPDATE nodes SET held = held - 1, held_eval = held_eval - ?, returned = returned + 1, "
            "produced = produced + ?, stale = stale + ? WHERE name = ?",
            (lane == "eval", produced, produced if stale else 0, node),
        )

    def cancelled(self, node: str, lane: str) -> None:
        self._db.run(
            "UPDATE nodes SET held = held - 1, held_eval = held_eval - ? WHERE name = ?", (lane == "eval", node)
        )

    def refused(self, node: str, lane: str, samples: int) -> None:
        produced = samples if lane == "train" else 0
        self._count("refused = refused + 1, produced = produced + ?", produced, node)

    def consumed(self, node: str, samples: int) -> None:
        self._count("consumed = consumed + ?", samples, node)

    def expired(self, node: str, samples: int) -> None:
        """Count samples that came to nothing for their age."""
        self._count("stale = stale + ?", samples, node)

    def _count(self, change: str, number: int, node: str) -> None:
        """Count for a node that may have been summed up since."""
        if not self._db.run(f"UPDATE nodes SET {change} WHERE name = ?", (number, node)):
            self._db.run(f"UPDATE nodes SET {change} WHERE name = ?", (number, SUM))

    # ------------------------------------------------------------ looking

    @property
    def healthy(self) -> int:
        return int(self._db.value("SELECT count(*) FROM nodes WHERE state = 'healthy'"))

    @property
    def seen(self) -> float | None:
        """When a node was heard of last, or None if none ever was."""
        found: float | None = self._db.value("SELECT max(seen) FROM nodes")
        return found

    @property
    def taking(self) -> int:
        """Nodes that take tasks."""
        return int(self._db.value(f"SELECT count(*) FROM nodes WHERE {TAKING}"))

    def serving(self, policy: str) -> list[int]:
        """Return the version that each live node serves of the policy, where it serves one."""
        known = map(json.loads, self._db.column("SELECT versions FROM nodes WHERE state = 'healthy'"))
        return [versions[policy] for versions in known if policy in versions]

    def held(self, node: str) -> tuple[int, int]:
        """Return how many tasks the node holds, and how many of them are evaluations."""
        row = self._db.one("SELECT held, held_eval FROM nodes WHERE name = ?", (node,))
        return (row[0], row[1]) if row else (0, 0)

    def infos(self) -> list[NodeInfo]:
        """Return the live nodes and those that went a short while ago."""
        now = self._clock.now()
        query = f"SELECT {Node.columns()} FROM nodes WHERE (state = 'healthy' OR seen > ?) AND name != ? ORDER BY name"
        nodes = self._db.rows(Node, query, (now - _GONE_SHOWN, SUM))
        return [node_info(node, now, _rate(node, now) if node.state == "healthy" else 0.0) for node in nodes]


def node_info(node: Node, now: float, throughput: float) -> NodeInfo:
    """Return a node as people see it."""
    return NodeInfo(
        name=node.name,
        state=node.state,
        active=node.active,
        leaving=bool(node.leaving),
        capacity=node.capacity,
        held=node.held,
        completed=node.completed,
        failed=node.failed,
        pace=node.pace,
        throughput=throughput,
        seen=max(0.0, now - node.seen),
        versions=json.loads(node.versions),
        stats=json.loads(node.stats),
    )


def _rate(node: Node, now: float) -> float:
    """Return a node's samples per second, a decayed mean. The first heartbeat gives none."""
    if node.rate_at is None or now <= node.rate_at:
        return float(node.rate)
    seconds = max(now - node.rate_at, 1.0)
    kept = math.exp(-seconds / _RATE_SECONDS) if node.rate > 0 else 0.0
    return float(node.rate * kept + (node.accepted - node.rate_accepted) / seconds * (1 - kept))


# ---------------------------------------------------------------- errors of user code

_MOST_ERRORS = 256  # distinct errors of a run; those beyond are counted as one
_SHOWN = 8  # in a status
_LONGEST_ERROR, _LONGEST_TRACE = 500, 4000
_OTHERS = UserError(kind="others", where="", error=f"beyond the first {_MOST_ERRORS} distinct errors")


class UserErrors(Part):
    """Each distinct error of user code once, with its traceback and how often it was seen."""

    def add(self, errors: Sequence[UserError]) -> None:
        """Count these errors. Nodes send them, so they are cut to what may be kept."""
        for error in errors:
            one = error if self._has_room(error) else _OTHERS
            count = min(max(error.count, 1), 1 << 31)
            self._db.run(
                "INSERT INTO user_errors VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, place) DO UPDATE SET "
                "n = n + excluded.n, trace = CASE trace WHEN '' THEN excluded.trace ELSE trace END",
                (*_key(one), one.error[:_LONGEST_ERROR], one.trace[-_LONGEST_TRACE:], count),
            )

    def _has_room(self, error: UserError) -> bool:
        known = self._db.value("SELECT 1 FROM user_errors WHERE kind = ? AND place = ?", _key(error))
        return known is not None or self._db.value("SELECT count(*) FROM user_errors") < _MOST_ERRORS

    def shown(self) -> list[UserError]:
        """Return the most frequent ones."""
        query = "SELECT kind, place, error, trace, n FROM user_errors ORDER BY n DESC, kind, place LIMIT ?"
        return [
            UserError(kind=kind, where=place, error=error, trace=trace, count=n)
            for kind, place, error, trace, n in self._db.all(query, (_SHOWN,))
        ]


def _key(error: UserError) -> tuple[str, str]:
    return error.kind[:100], error.where[:_LONGEST_ERROR]
