"""Payloads that are lost: rows that cannot be read as they were written, units that are gone.

The rows are set aside. Where no stream has trained on their group, the episodes are played again; where one has, what
the other streams would have got expires. Rows of what is trained are only noted: a rollback plays their episodes
again, and no replayer gets them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from rillflow.dataflow.batches import Batches
from rillflow.dataflow.groups import Groups
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.shares import Shares
from rillflow.dataflow.stages import Stages
from rillflow.types import Row

DAMAGED, UNIT_GONE = "damaged", "unit_gone"
_AT = "unit = ? AND segment = ? AND offset = ?"


class Losses(Part):
    def __init__(self, base: Base, groups: Groups, shares: Shares, batches: Batches, stages: Stages) -> None:
        super().__init__(base)
        self._groups = groups
        self._shares = shares
        self._batches = batches
        self._stages = stages

    def lose_rows(self, rows: Sequence[Row], reason: str) -> int:
        """Set these rows aside; returns how many of them anybody might have asked for."""
        samples: list[sqlite3.Row] = []
        extras: list[sqlite3.Row] = []
        for row in rows:
            at = (row.unit, row.segment, row.offset)
            samples += self._db.all(f"SELECT * FROM samples WHERE {_AT} AND live = 1", at)
            extras += self._db.all(f"SELECT * FROM extras WHERE {_AT}", at)
        return self._lose(samples, extras, reason, DAMAGED)

    def lose_unit(self, unit: str) -> int:
        """The unit is gone, and with it all its rows."""
        samples = self._db.all("SELECT * FROM samples WHERE unit = ? AND live = 1", (unit,))
        extras = self._db.all("SELECT * FROM extras WHERE unit = ?", (unit,))
        self._db.count("units_gone")
        return self._lose(samples, extras, f"unit {unit} was not heard of any more", UNIT_GONE)

    def _lose(self, samples: Sequence[sqlite3.Row], extras: Sequence[sqlite3.Row], reason: str, cause: str) -> int:
        number = sum(self._set_aside(row, reason) for row in (*samples, *extras))
        if number:
            self._db.count("quarantined", number)
        groups: dict[str, list[sqlite3.Row]] = {}
        for sample in samples:
            groups.setdefault(sample["grp"], []).append(sample)
        for group, lost in groups.items():
            self._lose_samples(group, lost, cause)
        for extra in extras:
            self._lose_extra(extra, cause)
        return number

    def _set_aside(self, row: sqlite3.Row, reason: str) -> int:
        return self._db.run(
            "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(row["unit"], row["segment"], row["offset"], row["length"]),
                *(f"{row['grp']}.{row['place']}.{row['n']}", reason, self._clock.now()),
            ),
        )

    def _lose_samples(self, group: str, lost: Sequence[sqlite3.Row], cause: str) -> None:
        row = self._groups.row(group)
        if row["lane"] == "eval" and not row["scoring"]:
            return  # its reward is known
        shares = self._shares.of(group)
        if any(share["state"] == "trained" for share in shares):
            producers = {sample["policy"] for sample in lost}
            self._lose_shares([share for share in shares if share["producer"] in producers], cause)
            self._groups.close(group)
            return
        for batch in sorted({share["batch"] for share in shares if share["state"] == "leased"}):
            self._batches.release(batch, cause)
        self._groups.rerun(group, sorted({sample["place"] for sample in lost}), cause)

    def _lose_shares(self, shares: Sequence[sqlite3.Row], cause: str) -> None:
        """Shares of a group of which one was trained."""
        for share in shares:
            key = (share["grp"], share["producer"], share["stream"])
            if share["state"] == "leased":
                self._batches.release(share["batch"], cause)
            if (now := self._shares.one(*key))["state"] == "ready":
                self._shares.end(now, "expired", cause)
            elif now["state"] == "trained":
                self._note(key, cause)

    def _note(self, key: tuple[str, str, str], cause: str) -> None:
        """A trained share whose rows are lost: nobody is served it again."""
        self._db.run("UPDATE shares SET damaged = 1 WHERE grp = ? AND producer = ? AND stream = ?", key)
        self._batches.release_replaying(*key, cause)

    def _lose_extra(self, extra: sqlite3.Row, cause: str) -> None:
        """What a stage has added: the stage handles the share again, unless it was trained or is played again."""
        key = (extra["grp"], extra["producer"], extra["stream"])
        share = self._db.one("SELECT * FROM shares WHERE grp = ? AND producer = ? AND stream = ?", key)
        if share is None or not self._db.value(
            "SELECT 1 FROM stage_shares WHERE grp = ? AND producer = ? AND stream = ? AND stage = ?",
            (*key, extra["stage"]),
        ):
            return
        if share["state"] == "leased":
            self._batches.release(share["batch"], cause)
        if share["state"] == "trained":
            self._note(key, cause)
        else:
            self._stages.redo(*key, extra["stage"])
