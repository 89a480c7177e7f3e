"""Rollout nodes as the ledger knows them: when they were heard of, what they serve, what they made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rillflow.dataflow.part import Part
from rillflow.dataflow.throttle import DECAY, Allowance, NodeLook, allowance
from rillflow.errors import BadRequest

_PACE = 0.8  # of the mean seconds that is kept at every success
_LONGEST = 1e9  # seconds; whatever a node says, the mean stays a number
_SUCCEEDED = (
    "UPDATE nodes SET held = held - ?, held_eval = held_eval - ?, ends = ends * ? + ?, bad_ends = bad_ends * ?, "
    "bad_row = 0, pace = CASE WHEN pace IS NULL THEN ? ELSE pace * ? + ? END, completed = completed + ?, "
    "produced = produced + ?, accepted = accepted + ? WHERE name = ?"
)
_FAILED = (
    "UPDATE nodes SET held = held - 1, held_eval = held_eval - ?, ends = ends * ? + 1, bad_ends = bad_ends * ? + 1, "
    "bad_row = bad_row + 1, failed = failed + 1, produced = produced + ? WHERE name = ?"
)


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
        # Another process: what the one before it did says nothing of it.
        self._db.run("UPDATE nodes SET ends = 0, bad_ends = 0, bad_row = 0, pace = NULL WHERE name = ?", (node,))
        return True

    def describe(self, node: str, capacity: int, stats: dict[str, float]) -> None:
        self._db.run("UPDATE nodes SET capacity = ?, stats = ? WHERE name = ?", (capacity, json.dumps(stats), node))

    # ------------------------------------------------------------ counting

    def leased(self, node: str, train: int, evaluation: int) -> None:
        self._db.run(
            "UPDATE nodes SET held = held + ?, held_eval = held_eval + ?, leased = leased + ? WHERE name = ?",
            (train + evaluation, evaluation, train + evaluation, node),
        )

    def succeeded(self, node: str, lane: str, seconds: Sequence[float], samples: int) -> None:
        """Episodes that took so long each have ended well. Samples are counted in the train lane only."""
        took = [min(max(one, 0.0), _LONGEST) for one in seconds]
        number, train = len(took), lane == "train"
        counted = samples if train else 0
        kept, pace, first = _PACE**number, 0.0, took[0]
        for one in took:
            pace, first = pace * _PACE + (1 - _PACE) * one, first * _PACE + (1 - _PACE) * one
        decay = DECAY**number
        self._db.run(
            _SUCCEEDED,
            (
                *(number, 0 if train else number, decay, sum(DECAY**n for n in range(number)), decay),
                *(first, kept, pace, number, counted, counted, node),
            ),
        )

    def failed(self, node: str, lane: str, samples: int) -> None:
        """An episode has ended badly."""
        train = lane == "train"
        self._db.run(_FAILED, (not train, DECAY, DECAY, samples if train else 0, node))

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
        self._db.run("UPDATE nodes SET refused = refused + 1, produced = produced + ? WHERE name = ?", (produced, node))

    def consumed(self, node: str, samples: int) -> None:
        self._db.run("UPDATE nodes SET consumed = consumed + ? WHERE name = ?", (samples, node))

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
        return int(self._db.value("SELECT count(*) FROM nodes WHERE state = 'healthy'"))

    def serving(self, policy: str) -> list[int]:
        """Of every node that lives and serves the policy, the version that it serves."""
        rows = self._db.all("SELECT versions FROM nodes WHERE state = 'healthy'")
        return [known[policy] for known in (json.loads(row["versions"]) for row in rows) if policy in known]

    def held(self, node: str) -> tuple[int, int]:
        """How many tasks the node holds, and how many of them are evaluations."""
        row = self._db.one("SELECT held, held_eval FROM nodes WHERE name = ?", (node,))
        return (row["held"], row["held_eval"]) if row else (0, 0)

    def allowance(self, node: str, want: int, behind: int, bound: int) -> Allowance:
        """How many tasks the node may hold; one that has not told its capacity has what it holds and wants."""
        looks = {}
        for row in self._db.all(
            "SELECT name, capacity, held, ends, bad_ends, bad_row, pace FROM nodes WHERE state = 'healthy'"
        ):
            capacity = row["capacity"] or row["held"] + want
            looks[row["name"]] = NodeLook(capacity, row["ends"], row["bad_ends"], row["bad_row"], row["pace"])
        mine = looks.pop(node, NodeLook(want))
        return allowance(mine, list(looks.values()), behind=behind, bound=bound)
