"""Which rows of the storage units may still be asked for; a segment in which there are none is dropped.

Every sample that is `live`, and every row that a stage has added to one, counts in its segment's `live`. A segment
whose count has been 0 for `drop_after` seconds is on its way out for good: nothing that refers to it is accepted.

A node or a stage worker that dies between its put and its report leaves rows that nobody knows of. Units tell which
segments they have; one that was never reported is dropped like the others, but not while a task or a stage batch is
held that was leased before the segment was found: its holder may still report a row of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rillflow.dataflow.database import Value
from rillflow.dataflow.part import Part
from rillflow.dataflow.tables import NEWEST, RECLAIMED
from rillflow.types import Row

_TAKE = (
    "UPDATE segments SET live = live + ?, touched = ?, unreported = NULL "
    "WHERE unit = ? AND segment = ? AND state = 'live' "
    "AND EXISTS (SELECT 1 FROM units WHERE units.unit = segments.unit AND units.state = 'healthy')"
)

_MOST_IDLE = 1000  # that a unit is asked about at once
_OLDEST_TASK = "SELECT min(a.leased_at) FROM tasks t JOIN attempts a ON a.id = t.attempt WHERE t.state = 'leased'"
_OLDEST_STAGE_BATCH = "SELECT min(CAST(substr(id, 2) AS INTEGER)) FROM stage_batches WHERE state = 'leased'"


class Rows(Part):
    def take(self, rows: Iterable[Row]) -> bool:
        """Count the rows as needed; False, changing nothing, when one lies where nothing can be read any more."""
        wanted: dict[tuple[str, int], int] = {}
        for row in rows:
            place = (row.unit, row.segment)
            wanted[place] = wanted.get(place, 0) + 1
        taken: list[tuple[str, int]] = []
        for place, number in wanted.items():
            if not self._take(place, number):
                for before in taken:
                    self._less(*before, wanted[before])
                return False
            taken.append(place)
        return True

    def _take(self, place: tuple[str, int], number: int) -> bool:
        return bool(self._db.run(_TAKE, (number, self._clock.now(), *place)) or self._know(place, number))

    def _know(self, place: tuple[str, int], number: int) -> bool:
        """A segment that was never heard of, of a unit that is there."""
        return bool(
            self._db.run(
                "INSERT OR IGNORE INTO segments (unit, segment, live, touched) "
                "SELECT ?, ?, ?, ? FROM units WHERE unit = ? AND state = 'healthy'",
                (*place, number, self._clock.now(), place[0]),
            )
        )

    def note(self, rows: Iterable[Row]) -> None:
        """Rows that nobody will ask for: their segments are known, so that they are dropped some day."""
        for place in {(row.unit, row.segment) for row in rows}:
            self._know(place, 0)

    def found(self, unit: str, segments: Sequence[int]) -> None:
        """The unit has these closed segments. Those that were never heard of are on watch from now on."""
        numbers = json.dumps([segment for segment in segments if 0 <= segment <= NEWEST])
        self._db.run(
            "INSERT OR IGNORE INTO segments (unit, segment, live, touched, unreported) "
            "SELECT ?, j.value, 0, ?, ? FROM json_each(?) j",
            (unit, self._clock.now(), self._db.counter("stage_batches"), numbers),
        )

    def _less(self, unit: str, segment: int, number: int) -> None:
        self._db.run(
            "UPDATE segments SET live = live - ?, touched = ? WHERE unit = ? AND segment = ?",
            (number, self._clock.now(), unit, segment),
        )

    # ------------------------------------------------------------ releasing

    def release(self, group: str, producer: str | None = None) -> None:
        """Nobody will ask for the samples of this group, or of this producer in it, again."""
        where, values = "grp = ?", [group]
        if producer is not None:
            where, values = "grp = ? AND policy = ?", [group, producer]
        self._uncount("samples", f"{where} AND live = 1", values)
        self._db.run(f"UPDATE samples SET live = 0 WHERE {where} AND live = 1", values)

    def forget(self, group: str, place: int) -> None:
        """The samples of this task have never been."""
        self._uncount("samples", "grp = ? AND place = ? AND live = 1", (group, place))
        self._db.run("DELETE FROM samples WHERE grp = ? AND place = ?", (group, place))

    def forget_extras(self, group: str, producer: str, stream: str, stage: str | None = None) -> None:
        """The rows that stages, or this one, have added to a share."""
        where, values = "grp = ? AND producer = ? AND stream = ?", [group, producer, stream]
        if stage is not None:
            where, values = f"{where} AND stage = ?", [*values, stage]
        self._uncount("extras", where, values)
        self._db.run(f"DELETE FROM extras WHERE {where}", values)
        self._db.run(f"DELETE FROM stage_shares WHERE {where}", values)

    def _uncount(self, table: str, where: str, values: Sequence[Value]) -> None:
        for row in self._db.all(
            f"SELECT unit, segment, count(*) AS n FROM {table} WHERE {where} GROUP BY unit, segment", values
        ):
            self._less(row["unit"], row["segment"], row["n"])

    # ------------------------------------------------------------ dropping

    def idle(self, unit: str) -> list[int]:
        """Segments that nobody has needed for a while: they can go, unless somebody still writes into them."""
        rows = self._db.all(
            "SELECT segment, touched, unreported FROM segments WHERE unit = ? AND state = 'live' AND live = 0 "
            "AND touched < ? ORDER BY segment LIMIT ?",
            (unit, self._clock.now() - self._rules.drop_after, _MOST_IDLE),
        )
        if all(row["unreported"] is None for row in rows):
            return [row["segment"] for row in rows]
        task, stage = self._db.value(_OLDEST_TASK), self._db.value(_OLDEST_STAGE_BATCH)
        return [
            row["segment"]
            for row in rows
            if row["unreported"] is None
            or ((task is None or row["touched"] < task) and (stage is None or row["unreported"] <= stage))
        ]

    def closed(self, unit: str, segments: Sequence[int]) -> None:
        """Nobody writes into these any more: those that are still idle are on their way out."""
        idle = set(self.idle(unit))
        self._db.many(
            "UPDATE segments SET state = 'dropping' WHERE unit = ? AND segment = ?",
            [(unit, segment) for segment in segments if segment in idle],
        )

    def grace(self) -> None:
        """The clock was set, or nobody was heard: no segment's time is over before it has passed."""
        self._db.run("UPDATE segments SET touched = ? WHERE state = 'live' AND live = 0", (self._clock.now(),))

    def dropping(self, unit: str) -> list[int]:
        return [
            row["segment"]
            for row in self._db.all(
                "SELECT segment FROM segments WHERE unit = ? AND state = 'dropping' ORDER BY segment", (unit,)
            )
        ]

    def dropped(self, unit: str, segments: Sequence[int]) -> None:
        for segment in segments:
            where = "unit = ? AND segment = ? AND state = 'dropping'"
            if self._db.value(f"SELECT unreported FROM segments WHERE {where}", (unit, segment)) is not None:
                self._db.count(RECLAIMED)
            self._db.run(f"UPDATE segments SET state = 'dropped' WHERE {where}", (unit, segment))
