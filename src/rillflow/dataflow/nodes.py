"""Rollout nodes as the ledger knows them: when they were heard of, what they serve, what they made."""

from __future__ import annotations

import json
from typing import Any

from rillflow.dataflow.part import Part
from rillflow.errors import BadRequest


class Nodes(Part):
    def grace(self) -> None:
        """Every node that was healthy has its full time to be heard of again."""
        self._db.run("UPDATE nodes SET seen = ? WHERE state = 'healthy'", (self._clock.now(),))

    def retired(self, node: str, incarnation: str) -> bool:
        """Whether this process is one that another has replaced under the same name."""
        return bool(self._db.value("SELECT 1 FROM retired WHERE node = ? AND incarnation = ?", (node, incarnation)))

    def hear(self, node: str, incarnation: str, versions: dict[str, int]) -> bool:
        """Note that the node lives; returns True when a new process took the node's name."""
        if not node or len(node) > 200:
            raise BadRequest("a node's name has 1 to 200 characters", "give every node a short name of its own")
        row = self._db.one("SELECT incarnation FROM nodes WHERE name = ?", (node,))
        now, version = self._clock.now(), versions.get(self._rules.policy)
        if row is None:
            self._db.run(
                "INSERT INTO nodes (name, incarnation, state, seen, version) VALUES (?, ?, 'healthy', ?, ?)",
                (node, incarnation, now, version),
            )
            return False
        self._db.run(
            "UPDATE nodes SET incarnation = ?, state = 'healthy', seen = ?, version = ? WHERE name = ?",
            (incarnation, now, version, node),
        )
        if row["incarnation"] == incarnation:
            return False
        self._db.run("INSERT OR IGNORE INTO retired VALUES (?, ?)", (node, row["incarnation"]))
        return True

    def describe(self, node: str, capacity: int, stats: dict[str, float]) -> None:
        self._db.run("UPDATE nodes SET capacity = ?, stats = ? WHERE name = ?", (capacity, json.dumps(stats), node))

    def add(self, node: str, **counts: int) -> None:
        """Add to the node's counters; the names are columns, never input."""
        sets = ", ".join(f"{name} = {name} + ?" for name in counts)
        self._db.run(f"UPDATE nodes SET {sets} WHERE name = ?", (*counts.values(), node))

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

    def report(self) -> dict[str, dict[str, Any]]:
        """The raw counters of every node, for balance."""
        return {
            row["name"]: {
                **{key: row[key] for key in row.keys() if key not in ("name", "incarnation", "stats")},  # noqa: SIM118
                "stats": json.loads(row["stats"]),
            }
            for row in self._db.all("SELECT * FROM nodes ORDER BY name")
        }
