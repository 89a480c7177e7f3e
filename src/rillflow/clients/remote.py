"""Rows of units on other hosts: byte ranges of segments, or whole calls where a unit has no segments.

Records that lie beside each other are fetched together, several requests run at a time, and the bytes of a segment
are verified here, as if they had been read from a disk; the unit has verified the rows of a whole call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rillflow.clients.directory import GET_LIMIT, Directory, UnitClient
from rillflow.errors import BadRequest, CorruptData, Unavailable
from rillflow.storage.records import Arrays, Place, read_record
from rillflow.types import Row, UnitInfo

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
        return [_try_record(data, start, row, dtypes) for row in rows]

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


def _try_record(data: bytes, start: int, row: Row, dtypes: Dtypes) -> Arrays | CorruptData:
    try:
        return read_record(data, row.offset - start, Place(row.segment, row.offset, row.length), dtypes)
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
