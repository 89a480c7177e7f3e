"""Storage units as the ledger knows them: where they are, how loaded, when they were heard of."""

from __future__ import annotations

import math

import msgspec

from rillflow.dataflow.part import Part
from rillflow.errors import BadRequest
from rillflow.types import UnitInfo
from rillflow.types.decoding import json_decoder


class Roster(Part):
    def hear(self, info: UnitInfo) -> None:
        if not info.unit or len(info.unit) > 200:
            raise BadRequest("a unit's name has 1 to 200 characters", "a unit draws its name once and keeps it")
        if not math.isfinite(info.load):
            raise BadRequest(f"the load of unit {info.unit!r:.80} is {info.load}", "a unit's load is its waiting bytes")
        self._db.run(
            "INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?, 'healthy')",
            (info.unit, msgspec.json.encode(info).decode(), info.load, self._clock.now()),
        )

    def grace(self) -> None:
        """Every unit that was healthy has its full time to be heard of again."""
        self._db.run("UPDATE units SET seen = ? WHERE state = 'healthy'", (self._clock.now(),))

    def healthy(self) -> list[UnitInfo]:
        """The units that were heard of lately, the least loaded first."""
        rows = self._db.all("SELECT info FROM units WHERE state = 'healthy' ORDER BY load, unit")
        return [json_decoder(UnitInfo).decode(row["info"]) for row in rows]

    @property
    def count(self) -> int:
        return int(self._db.value("SELECT count(*) FROM units WHERE state = 'healthy'"))

    @property
    def seen(self) -> float | None:
        """When a unit was heard of last, or None if none ever was."""
        found: float | None = self._db.value("SELECT max(seen) FROM units")
        return found

    def silent(self) -> list[str]:
        """Units that were not heard of for too long; they count as gone from now on."""
        rows = self._db.all(
            "SELECT unit FROM units WHERE state = 'healthy' AND seen < ?",
            (self._clock.now() - self._rules.unit_timeout,),
        )
        for row in rows:
            self._db.run("UPDATE units SET state = 'gone' WHERE unit = ?", (row["unit"],))
        return [row["unit"] for row in rows]
