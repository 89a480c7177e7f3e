"""Reads payload columns of rows in any number of units: mapped where a unit's folder lies on this host, else over HTTP.

Mapped columns are views into the file (zero copy, read-only) and stay valid as long as they are referred to. Every
column that is handed out was verified by this process, or by the unit where that has no segments. Rows that cannot be
read as they were written are named all at once, in one `DamagedRows`; a unit that cannot be reached is another matter,
and an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rillflow.clients.columns import dtypes_of
from rillflow.clients.directory import GET_LIMIT, UNIT_ID_FILE, Directory
from rillflow.clients.remote import Dtypes, Found, RemoteReader
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import CorruptData, DeadlineExceeded
from rillflow.storage import SegmentReader
from rillflow.storage.records import Arrays, Place
from rillflow.types import Row, UnitInfo, Units

__all__ = ["GET_LIMIT", "UNIT_ID_FILE", "Arrays", "DamagedRows", "PayloadReader"]

READ_DEADLINE = 120.0
PATIENCE = 3.0  # seconds in which an unknown unit may report: the service may just have started
_PAUSE = 0.1
# Mapped and verified at once, without a thread: it would hold the interpreter's lock all the time, and waking it costs
# more than it takes. Longer work yields to others in between.
_BRIEF_BYTES = 8 << 20


class DamagedRows(CorruptData):
    """`rows` are all rows of a call that are damaged, missing or in an unknown unit."""

    def __init__(self, rows: Sequence[Row], first: CorruptData) -> None:
        super().__init__(
            f"{len(rows)} rows cannot be read as they were written, first {rows[0]}: {first.message}",
            first.hint or "report them as lost: their episodes are played again",
        )
        self.rows = list(rows)


class PayloadReader:
    """Reads from one event loop. `units` lists the units; see `Directory`."""

    def __init__(
        self,
        units: Callable[[], Awaitable[Units]],
        token: str,
        *,
        allow_map: bool = True,
        deadline: float = READ_DEADLINE,
        patience: float = PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._directory = Directory(units, token, clock=self._clock)
        self._allow_map = allow_map
        self._deadline = deadline
        self._patience = patience
        self._remote = RemoteReader(self._directory, deadline)
        self._mapped: dict[tuple[str, str], SegmentReader] = {}

    @property
    def mapped(self) -> int:
        """How many units are read from their folders so far."""
        return len(self._mapped)

    async def read(self, rows: Sequence[Row], columns: Sequence[str]) -> list[Arrays]:
        """One dict of arrays per row, in the rows' order; a column that a row does not have is left out."""
        dtypes = dtypes_of(columns)
        members: dict[str, list[int]] = {}
        for n, row in enumerate(rows):
            members.setdefault(row.unit, []).append(n)
        parts = await self._all_units({unit: [rows[n] for n in ns] for unit, ns in members.items()}, dtypes)
        found: Found = [{} for _ in rows]
        for ns, part in zip(members.values(), parts, strict=True):
            for n, one in zip(ns, part, strict=True):
                found[n] = one
        return _whole(rows, found)

    async def read_samples(self, samples: Sequence[Sequence[Row]], columns: Sequence[str]) -> list[Arrays]:
        """One dict of arrays per sample, whose rows are merged: where two have a column, the later one's."""
        flat = iter(await self.read([row for sample in samples for row in sample], columns))
        merged: list[Arrays] = []
        for sample in samples:
            arrays: Arrays = {}
            for _ in sample:
                arrays |= next(flat)
            merged.append(arrays)
        return merged

    async def close(self) -> None:
        self._mapped.clear()
        await self._directory.close()

    # ------------------------------------------------------------ one unit

    async def _all_units(self, rows: dict[str, list[Row]], dtypes: Dtypes) -> list[Found]:
        try:
            async with asyncio.timeout(self._deadline):
                return await self._side_by_side(rows, dtypes)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"rows of the units {', '.join(rows)} could not be read within {self._deadline:.0f} s",
                "look at the logs of the units",
            ) from error
        except ExceptionGroup as errors:
            raise _first(errors) from None

    async def _side_by_side(self, rows: dict[str, list[Row]], dtypes: Dtypes) -> list[Found]:
        if len(rows) == 1:
            ((unit, part),) = rows.items()
            return [await self._read_unit(unit, part, dtypes)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._read_unit(unit, part, dtypes)) for unit, part in rows.items()]
        return [task.result() for task in tasks]

    async def _read_unit(self, unit: str, rows: list[Row], dtypes: Dtypes) -> Found:
        info = await self._find(unit)
        if info is None:
            return [CorruptData(f"nobody knows the unit {unit}") for _ in rows]
        if self._allow_map and self._directory.here(info):
            key = (info.unit, info.path)
            mapped = self._mapped.setdefault(key, SegmentReader(Path(info.path)))
            places = [Place(row.segment, row.offset, row.length) for row in rows]
            if sum(place.length for place in places) <= _BRIEF_BYTES:
                return mapped.read(places, dtypes)
            return await asyncio.to_thread(mapped.read, places, dtypes)
        return await self._remote.read(info, rows, dtypes)

    async def _find(self, unit: str) -> UnitInfo | None:
        end = self._clock.monotonic() + self._patience
        while True:
            info = await self._directory.find(unit)
            if info is not None or self._clock.monotonic() >= end:
                return info
            await asyncio.sleep(_PAUSE)


def _first(error: Exception) -> Exception:
    """Groups lie in groups: a unit's requests run side by side, and so do the units."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def _whole(rows: Sequence[Row], found: Found) -> list[Arrays]:
    whole = [one for one in found if not isinstance(one, CorruptData)]
    if len(whole) < len(found):
        bad = [(row, one) for row, one in zip(rows, found, strict=True) if isinstance(one, CorruptData)]
        raise DamagedRows([row for row, _ in bad], bad[0][1])
    return whole
