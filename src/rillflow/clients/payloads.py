"""Reads payload columns of rows in any number of units: mapped where a unit's folder lies on this host, else over HTTP.

Mapped columns are views into the file (zero copy, read-only) and stay valid as long as they are referred to. Every
column that is handed out was verified by this process, or by the unit where that has no segments. Rows that cannot be
read as they were written are named all at once, in one `DamagedRows`; a unit that cannot be reached is another matter,
and an error of its own.

From other hosts come byte ranges of segments, or the answers of whole calls where a unit has no segments. Records that
lie beside each other are fetched together, and several requests run at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rillflow.clients.unit_directory import GET_LIMIT, UNIT_ID_FILE, Directory, UnitClient, dtypes_of
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, CorruptData, DeadlineExceeded, Unavailable
from rillflow.storage import SegmentReader
from rillflow.storage.records import Arrays, Place, Views, read_record
from rillflow.types import Row, UnitInfo, Units

__all__ = ["GET_LIMIT", "UNIT_ID_FILE", "Arrays", "DamagedRows", "PayloadReader"]


# ---------------------------------------------------------------- units on other hosts

Dtypes = Mapping[str, np.dtype[Any]]
Found = list[Arrays | CorruptData]
Fetch = Callable[[UnitClient, list[Row]], Awaitable[Found]]

_ROWS_A_CALL = 64
_RANGE_BYTES = 8 << 20  # of one request, unless a single record is longer
_GAP_BYTES = 16 << 10  # read along rather than asked around
_REQUESTS = 8
_MOST_SEGMENTS = 10**15  # that any unit will ever have; the number is part of a URL
_PAUSE = 0.1


class RemoteReader:
    """Reads over HTTP; the caller bounds the time of a read."""

    def __init__(self, directory: Directory, deadline: float) -> None:
        self._directory = directory
        self._deadline = deadline
        self._requests = asyncio.Semaphore(_REQUESTS)

    async def read(self, info: UnitInfo, rows: Sequence[Row], dtypes: Dtypes) -> Found:
        """For every row its columns, or what is wrong with it."""

        async def by_range(client: UnitClient, part: list[Row]) -> Found:
            return await self._range(client, part, dtypes)

        async def by_call(client: UnitClient, part: list[Row]) -> Found:
            return await self._call(client, part, dtypes)

        found: Found = [CorruptData(f"there is no row {row}") for row in rows]
        real = [n for n, row in enumerate(rows) if _may_be(row)]
        parts = split_ranges(rows, real) if info.path else split_calls(rows, real)
        fetch = by_range if info.path else by_call
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._fetch(info.unit, [rows[n] for n in part], fetch)) for part in parts]
        for part, task in zip(parts, tasks, strict=True):
            for n, one in zip(part, task.result(), strict=True):
                found[n] = one
        return found

    async def _fetch(self, unit: str, rows: list[Row], fetch: Fetch) -> Found:
        """One request, made again until the unit answers: it may come back at another address."""
        since = 0
        while True:
            info = await self._directory.find(unit, since=since)
            since = self._directory.asked
            try:
                if info is None:
                    raise Unavailable(f"unit {unit} is not there")
                async with self._requests:
                    return await fetch(self._directory.client(info), rows)
            except Unavailable:
                await asyncio.sleep(_PAUSE)
            except (CorruptData, BadRequest) as error:  # a place that no unit can have is as bad as a lost one
                middle = len(rows) // 2
                if not middle:
                    return [CorruptData(error.message, error.hint)]
                # One bad row spoils a request: halve it, until the bad ones stand alone.
                first = await self._fetch(unit, rows[:middle], fetch)
                return first + await self._fetch(unit, rows[middle:], fetch)

    async def _range(self, client: UnitClient, rows: list[Row], dtypes: Dtypes) -> Found:
        segment, start = rows[0].segment, rows[0].offset
        end = max(row.offset + row.length for row in rows)
        pieces = [
            await client.get_range(segment, at, min(at + GET_LIMIT, end), self._deadline)
            for at in range(start, end, GET_LIMIT)
        ]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        views = Views(data, dtypes)
        return [_try_record(views, start, row) for row in rows]

    async def _call(self, client: UnitClient, rows: list[Row], dtypes: Dtypes) -> Found:
        got = await client.get_rows(rows, list(dtypes), self._deadline)
        if len(got) != len(rows):
            raise CorruptData(f"{client.peer} answered {len(got)} rows instead of {len(rows)}")
        return [_arrays(client.peer, row, dtypes) for row in got]


def _may_be(row: Row) -> bool:
    """Return whether such a place is possible."""
    return 0 <= row.segment < _MOST_SEGMENTS and row.offset >= 0 and row.length > 0


def _arrays(peer: str, row: Mapping[str, bytes], dtypes: Dtypes) -> Arrays:
    try:
        return {name: np.frombuffer(data, dtypes[name]) for name, data in row.items()}
    except (KeyError, ValueError) as error:
        raise CorruptData(f"{peer} answered something else than the columns asked for: {error}") from error


def _try_record(views: Views, start: int, row: Row) -> Arrays | CorruptData:
    try:
        return read_record(views, row.offset - start, Place(row.segment, row.offset, row.length))
    except CorruptData as error:
        return error


def split_ranges(rows: Sequence[Row], members: Iterable[int]) -> list[list[int]]:
    """The rows' numbers, those that lie beside each other together, in the order in which they lie."""
    parts: list[list[int]] = []
    segment, first, end = -1, 0, 0
    for n in sorted(members, key=lambda n: (rows[n].segment, rows[n].offset)):
        row = rows[n]
        near = row.segment == segment and row.offset <= end + _GAP_BYTES
        if near and row.offset + row.length - first <= _RANGE_BYTES:
            parts[-1].append(n)
            end = max(end, row.offset + row.length)
        else:
            parts.append([n])
            segment, first, end = row.segment, row.offset, row.offset + row.length
    return parts


def split_calls(rows: Sequence[Row], members: Iterable[int]) -> list[list[int]]:
    """The rows' numbers in parts that a unit answers: few enough, and not too long together."""
    parts: list[list[int]] = []
    size = 0
    for n in members:
        if not parts or len(parts[-1]) == _ROWS_A_CALL or size + rows[n].length > GET_LIMIT:
            parts.append([])
            size = 0
        parts[-1].append(n)
        size += rows[n].length
    return parts


# ---------------------------------------------------------------- all units

READ_DEADLINE = 120.0
PATIENCE = 3.0  # seconds in which an unknown unit may report: the service may just have started
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
