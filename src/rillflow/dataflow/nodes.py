"""Rollout nodes as the ledger knows them: when they were heard of, what they serve, what they made, whether they leave.

A node that leaves gets no more tasks and is not lost: what it hands back counts against nobody. A process that comes
under the name of one that has left, or was told to, is a new node.

The last nodes that have gone are kept for people to look at. All others that have gone and hold nothing are summed up
in one row, so that neither a lease nor a report costs more the more nodes have come and gone.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence

from rillflow.dataflow.balance import SUM
from rillflow.dataflow.part import Part
from rillflow.dataflow.throttle import DECAY, Allowance, NodeLook, Work, allowance, is_slow
from rillflow.errors import BadRequest
from rillflow.types import Heartbeat, NodeInfo

_PACE = 0.8  # of the mean seconds that is kept at every success
_LONGEST = 1e9  # seconds; whatever a node says, the mean stays a number
_SHORTEST = 1e-3  # seconds; nobody is infinitely quick
_RATE_SECONDS = 30.0  # over which samples a second are counted, roughly
_GONE_SHOWN = 3600.0  # seconds that a node which is gone is listed
_MOST_GONE = 64  # nodes which are gone that are kept apart from the sum
_COUNTS = ("leased", "completed", "refused", "failed", "returned", "produced", "accepted", "consumed", "stale")
_SUCCEEDED = (
    "UPDATE nodes SET held = held - ?, held_eval = held_eval - ?, ends = ends * ? + ?, bad_ends = bad_ends * ?, "
    "bad_row = 0, pace = CASE WHEN pace IS NULL THEN ? ELSE pace * ? + ? END, made = made * ? + ?, "
    "busy = busy * ? + ?, ended_at = ?, completed = completed + ?, produced = produced + ?, accepted = accepted + ? "
    "WHERE name = ?"
)
_FAILED = (
    "UPDATE nodes SET held = held - 1, held_eval = held_eval - ?, ends = ends * ? + 1, bad_ends = bad_ends * ? + 1, "
    "bad_row = bad_row + 1, ended_at = ?, failed = failed + 1, produced = produced + ? WHERE name = ?"
)
_HEALTHY = "SELECT count(*) FROM nodes WHERE state = 'healthy'"
_TAKING = "state = 'healthy' AND leaving = 0 AND active = 'rollout'"


class Nodes(Part):
    def grace(self) -> None:
        """Every node that was healthy has its full time to be heard of again."""
        self._db.run("UPDATE nodes SET seen = ? WHERE state = 'healthy'", (self._clock.now(),))

    def retired(self, node: str, incarnation: str) -> bool:
        """Whether this process is one that another has replaced under the same name."""
        return bool(self._db.value("SELECT 1 FROM retired WHERE node = ? AND incarnation = ?", (node, incarnation)))

    def hear(self, node: str, incarnation: str, versions: Mapping[str, int]) -> bool:
        """Note that the node lives; returns True when a new process took the node's name."""
        if not node or len(node) > 200:
            raise BadRequest("a node's name has 1 to 200 characters", "give every node a short name of its own")
        row = self._db.one("SELECT incarnation FROM nodes WHERE name = ?", (node,))
        known = {policy: versions[policy] for policy in self._rules.policies if policy in versions}
        values = (self._clock.now(), versions.get(self._rules.policy), json.dumps(known))
        if row is None:
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
        if row["incarnation"] == incarnation:
            return False
        self._db.run("INSERT OR IGNORE INTO retired VALUES (?, ?)", (node, row["incarnation"]))
        # Another process: what the one before it did says nothing of it, nor does what that one was told.
        self._db.run(
            "UPDATE nodes SET ends = 0, bad_ends = 0, bad_row = 0, pace = NULL, made = 0, busy = 0, ended_at = NULL, "
            "rate = 0, rate_at = NULL, leaving = 0, leave_at = NULL, drain = NULL WHERE name = ?",
            (node,),
        )
        return True

    def describe(self, beat: Heartbeat) -> None:
        """What the node says of itself, and how many samples it has brought since it did so last."""
        row = self._db.one("SELECT rate, rate_at, rate_accepted, accepted FROM nodes WHERE name = ?", (beat.node,))
        assert row is not None, "heard of before"
        now = self._clock.now()
        rate = _rate(row, now)
        self._db.run(
            "UPDATE nodes SET capacity = ?, stats = ?, active = ?, leaving = max(leaving, ?), rate = ?, rate_at = ?, "
            "rate_accepted = ? WHERE name = ?",
            (
                *(beat.capacity, json.dumps(beat.stats), beat.active[:100], beat.leaving),
                *(rate, now, row["accepted"], beat.node),
            ),
        )

    # ------------------------------------------------------------ leaving

    def retire(self, node: str, drain: float) -> None:
        """The node is to be gone in so many seconds. Told again, the earlier end counts."""
        row = self._db.one("SELECT state, leave_at FROM nodes WHERE name = ?", (node,))
        if row is None or row["state"] != "healthy":
            known = "is not there any more" if row is not None else "was never heard of"
            raise BadRequest(f"node {node!r:.80} {known}", "`rillflow nodes RUN` lists those that are there")
        if not 0 <= drain <= _LONGEST:
            raise BadRequest(f"a node cannot leave within {drain} seconds", "give 0 or more")
        until = self._clock.now() + drain
        if row["leave_at"] is None or until < row["leave_at"]:
            self._db.run("UPDATE nodes SET leaving = 1, leave_at = ?, drain = ? WHERE name = ?", (until, drain, node))

    def leave_in(self, node: str) -> float | None:
        """The seconds that a node which was retired has left; None for one that stays."""
        row = self._db.one("SELECT leave_at, drain FROM nodes WHERE name = ?", (node,))
        if row is None or row["leave_at"] is None:
            return None
        # Not more than it was given: the clock may have been set back.
        return max(0.0, min(float(row["leave_at"]) - self._clock.now(), float(row["drain"])))

    def leave(self, node: str, incarnation: str) -> None:
        """This process of the node goes for good and is not heard again."""
        self._db.run("INSERT OR IGNORE INTO retired VALUES (?, ?)", (node, incarnation))
        self._db.run("UPDATE nodes SET state = 'left', leaving = 1 WHERE name = ?", (node,))

    def is_leaving(self, node: str) -> bool:
        return bool(self._db.value("SELECT leaving FROM nodes WHERE name = ?", (node,)))

    def overdue(self) -> list[tuple[str, str]]:
        """Names and incarnations of those that should have gone and have not, though they are still heard of."""
        rows = self._db.all(
            "SELECT name, incarnation FROM nodes WHERE state = 'healthy' AND leave_at < ?",
            (self._clock.now() - self._rules.node_timeout,),
        )
        return [(row["name"], row["incarnation"]) for row in rows]

    # ------------------------------------------------------------ counting

    def leased(self, node: str, train: int, evaluation: int) -> None:
        self._db.run(
            "UPDATE nodes SET held = held + ?, held_eval = held_eval + ?, leased = leased + ? WHERE name = ?",
            (train + evaluation, evaluation, train + evaluation, node),
        )

    def succeeded(self, node: str, lane: str, ends: Sequence[tuple[float, int]]) -> None:
        """Episodes that took so many seconds and left so many samples each have ended well. Samples are counted in the
        train lane only."""
        number, train = len(ends), lane == "train"
        counted = sum(samples for _, samples in ends) if train else 0
        took = [min(max(seconds, 0.0), _LONGEST) for seconds, _ in ends]
        pace, first, made, busy = 0.0, took[0], 0.0, 0.0
        for seconds, (_, samples) in zip(took, ends, strict=True):
            pace, first = pace * _PACE + (1 - _PACE) * seconds, first * _PACE + (1 - _PACE) * seconds
            made, busy = made * DECAY + samples, busy * DECAY + max(seconds, _SHORTEST)
        decay = DECAY**number
        self._db.run(
            _SUCCEEDED,
            (
                *(number, 0 if train else number, decay, sum(DECAY**n for n in range(number)), decay),
                *(first, _PACE**number, pace, decay, made, decay, busy, self._clock.now()),
                *(number, counted, counted, node),
            ),
        )

    def failed(self, node: str, lane: str, samples: int) -> None:
        """An episode has ended badly."""
        train = lane == "train"
        self._db.run(_FAILED, (not train, DECAY, DECAY, self._clock.now(), samples if train else 0, node))

    def returned(self, node: str, lane: str, samples: int = 0, *, stale: bool = False) -> None:
        """A lease has ended without a verdict on the episode."""
        produced = samples if lane == "train" else 0
        self._db.run(
            "UPDATE nodes SET held = held - 1, held_eval = held_eval - ?, returned = returned + 1, "
            "produced = produced + ?, stale = stale + ? WHERE name = ?",
            (lane == "eval", produced, produced if stale else 0, node),
        )

    def gave_up(self, node: str, lane: str) -> None:
        """A lease was cancelled."""
        self._db.run(
            "UPDATE nodes SET held = held - 1, held_eval = held_eval - ? WHERE name = ?", (lane == "eval", node)
        )

    def refused(self, node: str, lane: str, samples: int) -> None:
        produced = samples if lane == "train" else 0
        self._count("refused = refused + 1, produced = produced + ?", produced, node)

    def consumed(self, node: str, samples: int) -> None:
        self._count("consumed = consumed + ?", samples, node)

    def _count(self, change: str, number: int, node: str) -> None:
        """Count for a node that may have been summed up since."""
        if not self._db.run(f"UPDATE nodes SET {change} WHERE name = ?", (number, node)):
            self._db.run(f"UPDATE nodes SET {change} WHERE name = ?", (number, SUM))

    def sum_up(self) -> None:
        """Add the nodes that went long ago, and all but the latest of the others that are gone, to one row."""
        gone = "FROM nodes WHERE state != 'healthy' AND held = 0 AND name != ?"
        last = self._db.value(f"SELECT seen {gone} ORDER BY seen DESC LIMIT 1 OFFSET ?", (SUM, _MOST_GONE))
        until = max(last or 0.0, self._clock.now() - _GONE_SHOWN)
        rows = self._db.all(f"SELECT name {gone} AND seen <= ?", (SUM, until))
        if not rows:
            return
        names = json.dumps([row["name"] for row in rows])
        these = "IN (SELECT value FROM json_each(?))"
        self._db.run(
            f"INSERT OR REPLACE INTO nodes (name, incarnation, state, seen, {', '.join(_COUNTS)}) "
            f"SELECT ?, '', 'gone', max(seen), {', '.join(f'sum({name})' for name in _COUNTS)} FROM nodes "
            f"WHERE name = ? OR name {these}",
            (SUM, SUM, names),
        )
        self._db.run(f"DELETE FROM nodes WHERE name {these}", (names,))
        self._db.run(f"DELETE FROM retired WHERE node {these}", (names,))

    # ------------------------------------------------------------ looking

    def silent(self) -> list[str]:
        """Nodes that were not heard of for too long; they count as gone from now on."""
        rows = self._db.all(
            "SELECT name FROM nodes WHERE state = 'healthy' AND seen < ?",
            (self._clock.now() - self._rules.node_timeout,),
        )
        for row in rows:
            self._db.run("UPDATE nodes SET state = 'gone' WHERE name = ?", (row["name"],))
        return [row["name"] for row in rows]

    @property
    def healthy(self) -> int:
        return int(self._db.value(_HEALTHY))

    @property
    def seen(self) -> float | None:
        """When a node was heard of last, or None if none ever was."""
        found: float | None = self._db.value("SELECT max(seen) FROM nodes")
        return found

    @property
    def taking(self) -> int:
        """Nodes that take tasks."""
        return int(self._db.value(f"SELECT count(*) FROM nodes WHERE {_TAKING}"))

    def serving(self, policy: str) -> list[int]:
        """Of every node that lives and serves the policy, the version that it serves."""
        rows = self._db.all("SELECT versions FROM nodes WHERE state = 'healthy'")
        return [known[policy] for known in (json.loads(row["versions"]) for row in rows) if policy in known]

    def held(self, node: str) -> tuple[int, int]:
        """How many tasks the node holds, and how many of them are evaluations."""
        row = self._db.one("SELECT held, held_eval FROM nodes WHERE name = ?", (node,))
        return (row["held"], row["held_eval"]) if row else (0, 0)

    def allowance(self, node: str, want: int, work: Callable[[], Work], behind: int, bound: int) -> Allowance:
        """How many tasks the node may hold; one that has not told its capacity has what it holds and wants. What there
        is to do is asked for slow nodes alone: it takes long to count."""
        now, looks = self._clock.now(), {}
        for row in self._db.all(
            "SELECT name, capacity, held, ends, bad_ends, bad_row, pace, made, busy, ended_at FROM nodes "
            f"WHERE {_TAKING}"
        ):
            looks[row["name"]] = _look(row, row["capacity"] or row["held"] + want, now)
        mine = looks.pop(node, NodeLook(want))
        others = list(looks.values())
        known = work() if is_slow(mine, others) else Work(0)
        return allowance(mine, others, known, behind=behind, bound=bound)

    def infos(self) -> list[NodeInfo]:
        """Every node that is there, and those that went a short while ago."""
        now = self._clock.now()
        rows = self._db.all(
            "SELECT * FROM nodes WHERE (state = 'healthy' OR seen > ?) AND name != ? ORDER BY name",
            (now - _GONE_SHOWN, SUM),
        )
        return [
            NodeInfo(
                name=row["name"],
                state=row["state"],
                active=row["active"],
                leaving=bool(row["leaving"]),
                capacity=row["capacity"],
                held=row["held"],
                completed=row["completed"],
                failed=row["failed"],
                pace=row["pace"],
                throughput=_rate(row, now) if row["state"] == "healthy" else 0.0,
                seen=max(0.0, now - row["seen"]),
                versions=json.loads(row["versions"]),
                stats=json.loads(row["stats"]),
            )
            for row in rows
        ]


def _look(row: sqlite3.Row, capacity: int, now: float) -> NodeLook:
    return NodeLook(
        capacity,
        row["ends"],
        row["bad_ends"],
        row["bad_row"],
        row["pace"],
        row["made"] / row["busy"] if row["made"] > 0 and row["busy"] > 0 else None,
        row["held"],
        now - row["ended_at"] if row["ended_at"] is not None else 0.0,
    )


def _rate(row: sqlite3.Row, now: float) -> float:
    """Samples a second: what was known fades, what came since then counts. The first time tells nothing yet."""
    if row["rate_at"] is None or now <= row["rate_at"]:
        return float(row["rate"])
    seconds = max(now - row["rate_at"], 1.0)
    kept = math.exp(-seconds / _RATE_SECONDS) if row["rate"] > 0 else 0.0
    return float(row["rate"] * kept + (row["accepted"] - row["rate_accepted"]) / seconds * (1 - kept))
