"""Steps: what a commit leaves, for people and for the balance between the sides."""

from __future__ import annotations

import json
import sqlite3

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.streams import SKIPPED_IN_A_ROW
from rillflow.types import CommitBatch

_INTERNAL = ("cursor", "batches", "stage_batches", "samples.entered", SKIPPED_IN_A_ROW)
_MEMBERS = (
    "FROM members m JOIN samples s ON s.grp = m.grp AND s.policy = m.producer AND s.trained > 0 WHERE m.batch = ?"
)


class Steps(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes

    def write(self, news: CommitBatch, batch: sqlite3.Row, parent: int) -> None:
        """The step's row and its line, and what the nodes have the trainer's thanks for."""
        self._credit_nodes(batch["id"])
        sizes = self._db.one(
            "SELECT count(*) AS samples, sum(s.tokens) AS tokens, avg(m.head - s.oldest) AS mean, "
            f"max(m.head - s.oldest) AS most, sum(m.replayed) AS replayed {_MEMBERS}",
            (batch["id"],),
        )
        assert sizes is not None
        now = self._clock.now()
        # Of what was played: a batch that the filters have picked says little about the policy.
        reward, flat = self._take_recent(news.policy, batch["id"])
        self._db.run(
            "INSERT INTO steps (policy, version, parent, batch, samples, tokens, reward, staleness, step_seconds, "
            "wait_seconds, metrics, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(news.policy, news.version, parent, batch["id"], sizes["samples"], sizes["tokens"], reward),
                *(sizes["mean"], news.step_seconds, news.wait_seconds, json.dumps(news.metrics), now),
            ),
        )
        seconds = news.step_seconds + news.wait_seconds
        self._db.event(
            {
                **news.metrics,
                **self._groups.measured("SELECT grp FROM members WHERE batch = ?", batch["id"]),
                "policy": news.policy,
                "step": self._lineage.steps(news.policy),
                "version": news.version,
                "time": now,
                "reward": reward,
                "staleness_mean": sizes["mean"],
                "staleness_max": sizes["most"],
                "samples": sizes["samples"],
                "replayed": sizes["replayed"],
                "tokens": sizes["tokens"],
                "samples_per_second": sizes["samples"] / seconds if seconds > 0 else 0.0,
                "wait_fraction": news.wait_seconds / seconds if seconds > 0 else 0.0,
                "zero_variance_fraction": flat,
                "counters": self.counters(),
            }
        )

    def _credit_nodes(self, batch: str) -> None:
        for row in self._db.all(
            "SELECT t.node, count(*) AS n FROM members m JOIN samples s ON s.grp = m.grp AND s.policy = m.producer "
            "AND s.trained > 0 JOIN tasks t ON t.grp = s.grp AND t.place = s.place WHERE m.batch = ? "
            "AND m.replayed = 0 GROUP BY t.node",
            (batch,),
        ):
            self._nodes.consumed(row["node"], row["n"])

    def _take_recent(self, stream: str, batch: str) -> tuple[float, float]:
        """Mean reward, and share without variance, of the groups that became complete since the last step.

        Where none did (a batch served again after a rollback), the batch's own groups speak.
        """
        row = self._db.one("SELECT avg(reward) AS reward, avg(flat) AS flat FROM recent WHERE stream = ?", (stream,))
        if row is None or row["reward"] is None:
            row = self._db.one(
                "SELECT avg(h.mean) AS reward, 0.0 AS flat FROM members m JOIN shares h ON h.grp = m.grp "
                "AND h.producer = m.producer AND h.stream = ? WHERE m.batch = ?",
                (stream, batch),
            )
        assert row is not None
        self._db.run("DELETE FROM recent WHERE stream = ?", (stream,))
        return row["reward"], row["flat"]

    def counters(self) -> dict[str, int]:
        """Groups by state and cause, and everything else that is counted, by name.

        What waits for a trainer is told of the first policy's stream, and under its name of every other.
        """
        counts: dict[str, int] = {}
        for row in self._db.all("SELECT * FROM tally WHERE state != 'open'"):
            state = row["state"] if row["lane"] == "train" else f"eval.{row['state']}"
            counts[state] = counts.get(state, 0) + row["n"]
            if row["cause"]:
                counts[f"{state}.{row['cause']}"] = row["n"]
        for row in self._db.all("SELECT stream, state, sum(n) AS n FROM share_tally GROUP BY stream, state"):
            if row["stream"] != self._rules.policy:
                counts[f"{row['stream']}.{row['state']}"] = row["n"]
            elif row["state"] in ("ready", "leased"):
                counts[row["state"]] = row["n"]
        marks = ",".join("?" * len(_INTERNAL))
        others = self._db.all(f"SELECT name, value FROM counters WHERE name NOT IN ({marks})", _INTERNAL)
        renamed = {"admitted.train": "admitted", "admitted.eval": "eval.admitted"}
        return counts | {renamed.get(row["name"], row["name"]): row["value"] for row in others}
