"""Payloads that are lost: rows that cannot be read as they were written, units that are gone.

The rows are set aside. Where no stream has trained on their group, the episodes are played again; where one has, what
the other streams would have got expires. Rows of what is trained are only noted: a rollback plays their episodes
again, and no replayer gets them. Writes no table itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.dataflow.ledger.batches import Batches
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.payload import Storage
from rillflow.dataflow.ledger.shares import Key, Shares
from rillflow.dataflow.ledger.tables import Extra, Sample, Share
from rillflow.types import Row

DAMAGED, UNIT_GONE = "damaged", "unit_gone"
# Live samples belong to groups that play, that have a share whose rows are held, or that a running round evaluates.
_LIVE = (
    "SELECT id AS grp FROM groups WHERE lane = 'train' AND state = 'playing' "
    "UNION SELECT grp FROM shares WHERE state = 'ready' UNION SELECT grp FROM shares WHERE state = 'leased' "
    "UNION SELECT grp FROM shares WHERE state = 'trained' AND held = 1 "
    "UNION SELECT g.id FROM groups g JOIN rounds r ON r.id = g.round WHERE g.lane = 'eval' AND r.state = 'running'"
)


class LostRows(Part):
    def __init__(self, base: Base, groups: Groups, shares: Shares, batches: Batches, storage: Storage) -> None:
        super().__init__(base)
        self._groups = groups
        self._shares = shares
        self._batches = batches
        self._storage = storage

    def lose_rows(self, rows: Sequence[Row], reason: str) -> int:
        """Set these rows aside; returns how many of them anybody might have asked for."""
        samples: list[Sample] = []
        extras: list[Extra] = []
        for row in rows:
            at = (row.unit, row.segment, row.offset)
            where = "unit = ? AND segment = ? AND offset = ?"
            samples += self._samples(where, at)
            extras += self._extras(where, at)
        return self._lose(samples, extras, reason, DAMAGED)

    def lose_unit(self, unit: str) -> int:
        """Set all rows of a unit aside that is gone."""
        self._db.count("units_gone")
        where, reason = "unit = ?", f"unit {unit} was not heard of any more"
        return self._lose(self._samples(where, (unit,)), self._extras(where, (unit,)), reason, UNIT_GONE)

    def _samples(self, where: str, at: tuple[str | int, ...]) -> list[Sample]:
        query = f"SELECT {Sample.columns('s')} FROM ({_LIVE}) g JOIN samples s ON s.grp = g.grp WHERE s.live = 1 AND "
        return self._db.rows(Sample, f"{query} {where} ORDER BY s.grp, s.place, s.n", at)

    def _extras(self, where: str, at: tuple[str | int, ...]) -> list[Extra]:
        return self._db.rows(Extra, f"SELECT {Extra.columns()} FROM extras WHERE {where}", at)

    def _lose(self, samples: Sequence[Sample], extras: Sequence[Extra], reason: str, cause: str) -> int:
        lost_rows: list[Sample | Extra] = [*samples, *extras]
        number = sum(self._storage.quarantine(lost.row, lost.id, reason) for lost in lost_rows)
        if number:
            self._db.count("quarantined", number)
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.grp, []).append(sample)
        for group, lost in groups.items():
            self._lose_samples(group, lost, cause)
        for extra in extras:
            self._lose_extra(extra, cause)
        return number

    def _lose_samples(self, group: str, lost: Sequence[Sample], cause: str) -> None:
        row = self._groups.row(group)
        if row.lane == "eval" and not row.scoring:
            return  # its reward is known
        shares = self._shares.of(group)
        if any(share.state == "trained" for share in shares):
            producers = {sample.policy for sample in lost}
            self._lose_shares([share for share in shares if share.producer in producers], cause)
            self._groups.close(group)
            return
        for batch in sorted({share.batch for share in shares if share.state == "leased" and share.batch}):
            self._batches.release(batch, cause)
        self._groups.rerun(group, sorted({sample.place for sample in lost}), cause)

    def _lose_shares(self, shares: Sequence[Share], cause: str) -> None:
        """Take shares of a group back of which one was trained."""
        for share in shares:
            if share.state == "leased" and share.batch:
                self._batches.release(share.batch, cause)
            now = self._shares.find(share.key)
            if now is not None and now.state == "ready":
                self._shares.end(now, "expired", cause)
            elif now is not None and now.state == "trained":
                self._note(share.key, cause)

    def _note(self, key: Key, cause: str) -> None:
        """Note that rows of a trained share are lost: it is not served again."""
        self._shares.damage(key)
        self._batches.release_replaying(key, cause)

    def _lose_extra(self, extra: Extra, cause: str) -> None:
        """Let the stage handle the share again that it had added this to, unless it was trained or is played again."""
        share = self._shares.find((extra.grp, extra.producer, extra.stream))
        if share is None or not self._shares.handled_by(share.key, extra.stage):
            return
        if share.state == "leased" and share.batch:
            self._batches.release(share.batch, cause)
        if share.state == "trained":
            self._note(share.key, cause)
        else:
            self._shares.redo(extra)
