"""Batches: complete groups leased to the trainer for one step, and committed with the version that the step made.

A batch is leased, renewed and committed by the attempt that holds it. A trainer holds one batch at a time: asking
under a new attempt gives the earlier one up. Nothing older than the staleness bound is ever served.
"""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import dataclass

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.tables import NEWEST
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import Batch, BatchSample, CommitBatch, LeaseBatch, Row

_INTERNAL = ("cursor", "batches")
_OLD = "no longer this trainer's: "
_HINT = "join again: the trainer goes on from its last checkpoint"


@dataclass(frozen=True)
class Ready:
    """A group that may be served, as samplers see it."""

    id: str
    order: int
    oldest: int


class Batches(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes, hooks: Hooks) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes
        self._hooks = hooks

    def grace(self) -> None:
        """A live lease has its full time again."""
        self._db.run(
            "UPDATE batches SET deadline = ? WHERE state = 'leased'",
            (self._clock.now() + self._rules.batch_lease,),
        )

    # ------------------------------------------------------------ serving

    def held(self, ask: LeaseBatch) -> Batch | None:
        """The batch that this attempt leased before, its lease renewed."""
        self._db.run(
            "UPDATE batches SET deadline = ? WHERE attempt = ? AND state = 'leased'",
            (self._clock.now() + self._rules.batch_lease, ask.attempt),
        )
        row = self._db.one("SELECT * FROM batches WHERE attempt = ?", (ask.attempt,))
        if row is not None and row["state"] != "leased":
            raise LeaseLost(f"batch {row['id']} is {_OLD}{row['state']}", "ask under a new attempt id")
        return None if row is None else self._batch(row)

    def check(self, ask: LeaseBatch) -> None:
        if ask.version != self._lineage.head:
            raise LeaseLost(f"the trainer stands at version {ask.version}, the ledger at {self._lineage.head}", _HINT)
        if not 1 <= ask.groups <= self._rules.window:
            raise BadRequest(
                f"a batch of {ask.groups} groups can never be ready: at most {self._rules.window} are admitted",
                "ask for trainer.batch_groups groups",
            )

    def lease(self, ask: LeaseBatch, *, last: bool) -> Batch | None:
        """A new batch, or None when too few groups are ready; the `last` one of a run may be smaller."""
        self.release_all("replaced")
        self.refuse_stale()
        # On-policy the batch is the first groups of the order, not the first to be ready.
        rows = self._db.all(
            "SELECT id, ord, oldest FROM groups WHERE lane = 'train' AND state = 'ready' AND ord <= ? ORDER BY ord",
            (self._groups.window_end() if self._rules.on_policy else NEWEST,),
        )
        want = min(ask.groups, len(rows)) if last else ask.groups
        if want == 0 or len(rows) < want:
            return None
        ready = [Ready(row["id"], row["ord"], row["oldest"]) for row in rows]
        picked = set(self._hooks.pick(ready, want))
        return self._lease(ask, [group for group in ready if group.id in picked])

    def _lease(self, ask: LeaseBatch, picked: list[Ready]) -> Batch:
        number = self._db.counter("batches")
        self._db.count("batches")
        batch, now = f"b{number:06d}", self._clock.now()
        for group in picked:
            self._db.run(
                "INSERT INTO batch_groups VALUES (?, ?, ?)", (batch, group.id, max(0, ask.version - group.oldest))
            )
            self._groups.move(group.id, "leased")
        self._db.run(
            "INSERT INTO batches (id, policy, attempt, incarnation, version, samples, deadline, leased_at) "
            "VALUES (?, ?, ?, ?, ?, (SELECT count(*) FROM batch_groups b JOIN samples s ON s.grp = b.grp "
            "WHERE b.batch = ?), ?, ?)",
            (
                *(batch, ask.policy, ask.attempt, ask.incarnation, ask.version, batch),
                *(now + self._rules.batch_lease, now),
            ),
        )
        row = self._db.one("SELECT * FROM batches WHERE id = ?", (batch,))
        assert row is not None
        return self._batch(row)

    def _batch(self, row: sqlite3.Row) -> Batch:
        """Samples in order of admission, place and path, whoever finished first."""
        samples = self._db.all(
            "SELECT s.*, g.mean, g.std, g.size FROM batch_groups b JOIN groups g ON g.id = b.grp "
            "JOIN tasks t ON t.grp = g.id JOIN samples s ON s.grp = g.id AND s.task = t.id "
            "WHERE b.batch = ? AND s.trained > 0 ORDER BY g.ord, t.place, s.n",
            (row["id"],),
        )
        return Batch(
            id=row["id"],
            attempt=row["attempt"],
            policy=row["policy"],
            version=row["version"],
            samples=[_batch_sample(sample, row["version"]) for sample in samples],
            seconds=row["deadline"] - self._clock.now(),
        )

    def refuse_stale(self) -> None:
        """Nothing beyond the bound stays open: such groups expire; on-policy, their tasks are played again.

        A token of a version above the trainer's was sampled by weights that died between publish and commit.
        """
        head = self._lineage.head
        limit = head - self._rules.staleness
        for row in self._db.all(
            "SELECT id, oldest, newest, state FROM groups WHERE lane = 'train' AND state IN ('playing', 'ready') "
            "AND (oldest < ? OR (state = 'ready' AND newest > ?)) ORDER BY ord",
            (limit, head),
        ):
            if row["oldest"] < limit and not self._rules.on_policy:
                self._groups.end(row["id"], "expired", "stale")
                continue
            if row["oldest"] < limit:
                self._groups.rerun(row["id"], -1, limit - 1, "stale")
            if row["state"] == "ready" and row["newest"] > head:
                self._groups.rerun(row["id"], head, NEWEST, "rolled_back")

    # ------------------------------------------------------------ committing

    def commit(self, news: CommitBatch) -> bool:
        """Groups trained and version moved, together; False when this very commit was taken before."""
        row = self._db.one("SELECT * FROM batches WHERE id = ?", (news.batch,))
        if row is None or row["attempt"] != news.attempt:
            raise LeaseLost(f"there is no batch {news.batch!r:.80} of this attempt", _HINT)
        if row["state"] == "committed" and row["produced"] == news.version:
            return False
        if row["state"] != "leased" or row["incarnation"] != news.incarnation:
            raise LeaseLost(f"batch {row['id']} is {_OLD}{row['state']}", _HINT)
        if not (math.isfinite(news.step_seconds) and math.isfinite(news.wait_seconds)):
            raise BadRequest("step_seconds and wait_seconds must be numbers", "check the trainer's clock")
        parent = self._lineage.head
        self._lineage.move(news.version)
        if news.version > parent + 1:  # the numbers between were published by a trainer that died before its commit
            self._groups.rerun_dead(parent, news.version - 1)
        self._db.run(
            "UPDATE batches SET state = 'committed', produced = ?, ended_at = ? WHERE id = ?",
            (news.version, self._clock.now(), row["id"]),
        )
        for group in self._groups_of(row["id"]):
            self._groups.move(group, "trained")
        self._credit_nodes(row["id"])
        self._write_step(news, row, parent)
        return True

    def _groups_of(self, batch: str) -> list[str]:
        return [row["grp"] for row in self._db.all("SELECT grp FROM batch_groups WHERE batch = ?", (batch,))]

    def _credit_nodes(self, batch: str) -> None:
        for row in self._db.all(
            "SELECT t.node, count(*) AS n FROM batch_groups b JOIN samples s ON s.grp = b.grp "
            "JOIN tasks t ON t.id = s.task WHERE b.batch = ? GROUP BY t.node",
            (batch,),
        ):
            self._nodes.add(row["node"], consumed=row["n"])

    def _write_step(self, news: CommitBatch, batch: sqlite3.Row, parent: int) -> None:
        sizes = self._db.one(
            "SELECT count(*) AS samples, sum(s.tokens) AS tokens, avg(? - s.oldest) AS mean, max(? - s.oldest) AS most "
            "FROM batch_groups b JOIN samples s ON s.grp = b.grp WHERE b.batch = ? AND s.trained > 0",
            (batch["version"], batch["version"], batch["id"]),
        )
        assert sizes is not None
        now = self._clock.now()
        # Of what was played: a batch that the filters have picked says little about the policy.
        reward, flat = self._take_recent(batch["id"])
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
                "step": self._lineage.steps,
                "version": news.version,
                "time": now,
                "reward": reward,
                "staleness_mean": sizes["mean"],
                "staleness_max": sizes["most"],
                "samples": sizes["samples"],
                "tokens": sizes["tokens"],
                "samples_per_second": sizes["samples"] / seconds if seconds > 0 else 0.0,
                "wait_fraction": news.wait_seconds / seconds if seconds > 0 else 0.0,
                "zero_variance_fraction": flat,
                "counters": self.counters(),
            }
        )

    def _take_recent(self, batch: str) -> tuple[float, float]:
        """Mean reward, and share without variance, of the groups that became complete since the last step.

        Where none did (a batch served again after a rollback), the batch's own groups speak.
        """
        row = self._db.one("SELECT avg(reward) AS reward, avg(flat) AS flat FROM recent")
        if row is None or row["reward"] is None:
            query = "SELECT avg(mean) AS reward, 0.0 AS flat FROM groups JOIN batch_groups ON id = grp WHERE batch = ?"
            row = self._db.one(query, (batch,))
        assert row is not None
        self._db.run("DELETE FROM recent")
        return row["reward"], row["flat"]

    def counters(self) -> dict[str, int]:
        """Groups by state and cause, and everything else that is counted, by name."""
        counts: dict[str, int] = {}
        for row in self._db.all("SELECT * FROM tally"):
            state = row["state"] if row["lane"] == "train" else f"eval.{row['state']}"
            counts[state] = counts.get(state, 0) + row["n"]
            if row["cause"]:
                counts[f"{state}.{row['cause']}"] = row["n"]
        others = self._db.all("SELECT name, value FROM counters WHERE name NOT IN (?, ?)", _INTERNAL)
        renamed = {"admitted.train": "admitted", "admitted.eval": "eval.admitted"}
        return counts | {renamed.get(row["name"], row["name"]): row["value"] for row in others}

    # ------------------------------------------------------------ giving back

    def release_all(self, why: str) -> int:
        """Give up every leased batch; its groups are ready again."""
        rows = self._db.all("SELECT id FROM batches WHERE state = 'leased'")
        for row in rows:
            self._release(row["id"], why)
        return len(rows)

    def expire(self) -> int:
        rows = self._db.all("SELECT id FROM batches WHERE state = 'leased' AND deadline < ?", (self._clock.now(),))
        for row in rows:
            self._release(row["id"], "lease_expired")
        return len(rows)

    def _release(self, batch: str, why: str) -> None:
        self._db.run("UPDATE batches SET state = 'released', ended_at = ? WHERE id = ?", (self._clock.now(), batch))
        self._db.count(f"released.{why}")
        for group in self._groups_of(batch):
            self._groups.move(group, "ready")

    def roll_back(self, checkpoint: int) -> int:
        """Un-end the groups that were trained into versions after `checkpoint`; returns how many."""
        groups = self._db.all(
            "SELECT b.id, bg.grp FROM batches b JOIN batch_groups bg ON bg.batch = b.id "
            "WHERE b.state = 'committed' AND b.produced > ?",
            (checkpoint,),
        )
        for row in groups:
            self._groups.move(row["grp"], "ready")
        self._db.run(
            "UPDATE batches SET state = 'rolled_back' WHERE state = 'committed' AND produced > ?", (checkpoint,)
        )
        if groups:
            self._db.count("rolled_back", len(groups))
        return len(groups)


def _batch_sample(row: sqlite3.Row, version: int) -> BatchSample:
    return BatchSample(
        id=row["id"],
        row=Row(unit=row["unit"], segment=row["segment"], offset=row["offset"], length=row["length"]),
        tokens=row["tokens"],
        trained=row["trained"],
        reward=row["reward"],
        group=row["grp"],
        group_mean=row["mean"],
        group_std=row["std"],
        group_size=row["size"],
        staleness=max(0, version - row["oldest"]),
        truncated=bool(row["truncated"]),
    )
