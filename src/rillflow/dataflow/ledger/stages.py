"""Stages: consumers that handle every share of a stream before its trainer gets it, in any order and side by side.

A stage's worker leases shares, adds columns to their samples and commits; a lease that is lost returns. A share goes
to the trainer when all stages have handled it. What is played again, or expires, forgets what stages did.

The only writer of stage_batches.
"""

from __future__ import annotations

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.payload import Storage
from rillflow.dataflow.ledger.serving import served, stage_rows
from rillflow.dataflow.ledger.shares import SampleKey, Shares
from rillflow.dataflow.ledger.tables import StageBatch
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import Ack, Batch, CommitStage, LeaseStage, RenewBatch, SampleColumns

_HINT = "ask under a new attempt id"
_BATCH = f"SELECT {StageBatch.columns()} FROM stage_batches"


class Stages(Part):
    def __init__(self, base: Base, lineage: Lineage, shares: Shares, storage: Storage) -> None:
        super().__init__(base)
        self._lineage = lineage
        self._shares = shares
        self._storage = storage

    def open(self) -> None:
        """Forget what stages did that a resumed run no longer has."""
        for stream, rules in self._rules.policies.items():
            query = "SELECT DISTINCT grp, producer, stage FROM stage_shares WHERE stream = ?"
            for group, producer, stage in self._db.all(query, (stream,)):
                if stage not in rules.stages:
                    self._shares.forget_extras((group, producer, stream), stage)
            self._shares.count_stages(stream)

    def grace(self) -> None:
        self._db.run("UPDATE stage_batches SET deadline = ? WHERE state = 'leased'", (self._deadline(),))

    def _deadline(self) -> float:
        return self._clock.now() + self._rules.task_lease

    def check(self, policy: str, stage: str) -> None:
        self._lineage.check_policy(policy)
        known = self._rules.policies[policy].stages
        if stage not in known:
            raise BadRequest(f"policy {policy} has no stage {stage!r:.80}", f"its stages are {', '.join(known) or '-'}")

    # ------------------------------------------------------------ leasing

    def serve(self, ask: LeaseStage, *, may_open: bool) -> Batch | None:
        """Return the shares that this attempt holds, or some that the stage has not handled; None if all are
        handled."""
        if ask.groups < 1:
            raise BadRequest("a stage asks for 1 group at least", "set groups")
        row = self._db.row(StageBatch, f"{_BATCH} WHERE attempt = ?", (ask.attempt,))
        if row is None:
            row = self._open(ask) if may_open else None
            return None if row is None else self._batch(row)
        if row.state != "leased" or (row.stream, row.stage) != (ask.policy, ask.stage):
            raise LeaseLost(f"batch {row.id} of stage {row.stage} is {row.state}", _HINT)
        self.renew(RenewBatch(batch=row.id, attempt=ask.attempt))
        return self._batch(self._row(row.id))

    def _open(self, ask: LeaseStage) -> StageBatch | None:
        # Shares that are too old are skipped here: they expire when the trainer asks or commits.
        rows = self._db.all(
            "SELECT grp, producer FROM shares s JOIN policies p ON p.name = s.producer WHERE stream = ? "
            "AND state = 'ready' AND todo > 0 AND p.version - s.oldest <= ? AND NOT EXISTS "
            "(SELECT 1 FROM stage_shares d WHERE d.grp = s.grp AND d.producer = s.producer AND d.stream = s.stream "
            "AND d.stage = ?) ORDER BY ord LIMIT ?",
            (ask.policy, self._rules.policies[ask.policy].staleness, ask.stage, ask.groups),
        )
        if not rows:
            return None
        batch = f"s{self._db.counter('stage_batches'):06d}"
        self._db.count("stage_batches")
        self._db.run(
            "INSERT INTO stage_batches (id, stream, stage, attempt, version, deadline) VALUES (?, ?, ?, ?, ?, ?)",
            (batch, ask.policy, ask.stage, ask.attempt, self._lineage.head(ask.policy), self._deadline()),
        )
        self._shares.lease_to_stage(batch, ask.policy, ask.stage, rows)
        return self._row(batch)

    def _row(self, batch: str) -> StageBatch:
        row = self._db.row(StageBatch, f"{_BATCH} WHERE id = ?", (batch,))
        assert row is not None, batch
        return row

    def _batch(self, row: StageBatch) -> Batch:
        rows = stage_rows(self._db, row.id, row.stream)
        return Batch(
            id=row.id,
            attempt=row.attempt,
            policy=row.stream,
            version=row.version,
            samples=served(self._db, rows, row.stream, self._rules),
            seconds=row.deadline - self._clock.now(),
            groups=len({(sample.grp, sample.policy) for sample in rows}),
        )

    def renew(self, ask: RenewBatch) -> bool:
        """Return whether this attempt holds the batch; its lease has its full time again."""
        return bool(
            self._db.run(
                "UPDATE stage_batches SET deadline = ? WHERE id = ? AND attempt = ? AND state = 'leased'",
                (self._deadline(), ask.batch, ask.attempt),
            )
        )

    def expire(self) -> None:
        """Return the leases whose deadline has passed."""
        query = "SELECT id FROM stage_batches WHERE state = 'leased' AND deadline < ?"
        for batch in self._db.column(query, (self._clock.now(),)):
            self._release(batch, "lease_expired")

    def _release(self, batch: str, why: str) -> None:
        self._db.run("UPDATE stage_batches SET state = 'released' WHERE id = ?", (batch,))
        self._shares.return_from_stage(batch)
        self._db.count(f"stage_released.{why}")

    # ------------------------------------------------------------ committing

    def commit(self, news: CommitStage) -> Ack:
        """Take what the stage did to the batch's shares; those that were played again since are passed over."""
        row = self._db.row(StageBatch, f"{_BATCH} WHERE id = ? AND attempt = ?", (news.batch, news.attempt))
        if row is None or (row.stream, row.stage) != (news.policy, news.stage) or row.state == "released":
            raise LeaseLost(f"batch {news.batch!r:.80} is no longer this worker's", _HINT)
        if row.state == "done":
            return Ack(accepted=True)
        columns = self._columns(news)
        if not self._storage.take(column.row for column in columns.values()):
            self._release(row.id, "payload_gone")
            return Ack(accepted=False, reason="payload_gone: the stage handles these samples again")
        self._shares.handled(row, columns)
        self._db.run("UPDATE stage_batches SET state = 'done' WHERE id = ?", (row.id,))
        return Ack(accepted=True)

    def _columns(self, news: CommitStage) -> dict[SampleKey, SampleColumns]:
        """Return the columns by their sample, of the shares that the batch still has."""
        if not news.columns:
            return {}  # a stage that only looks
        if len({column.sample for column in news.columns}) != len(news.columns):
            raise BadRequest("a sample stands twice in what a stage commits", "send every sample's columns once")
        known = {
            f"{row.grp}.{row.place}.{row.n}": (row.grp, row.policy, row.place, row.n)
            for row in stage_rows(self._db, news.batch, news.policy)
        }
        self._storage.note(column.row for column in news.columns if column.sample not in known)
        return {known[column.sample]: column for column in news.columns if column.sample in known}
