"""Reads payload columns: mapped from the unit's folder when it lies on this host, else over the wire.

Mapped columns are views into the file (zero copy, read-only) and stay valid as long as they are referred to. Rows
are verified on either way; a damaged one raises CorruptData.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.errors import BadRequest
from rillflow.storage import SegmentReader
from rillflow.types import COLUMNS, GetRows, Row, RowsGot, UnitInfo
from rillflow.wire import Client

Arrays = dict[str, npt.NDArray[Any]]

UNIT_ID_FILE = "unit"
GET_LIMIT = 64 << 20  # bytes that a unit reads for one call
_ROWS_A_CALL = 64


class PayloadReader:
    """Reads rows of the unit behind `client`."""

    def __init__(self, client: Client, *, allow_map: bool = True) -> None:
        self._client = client
        self._allow_map = allow_map
        self._info: UnitInfo | None = None
        self._mapped: SegmentReader | None = None

    @property
    def mapped(self) -> bool:
        """Whether rows are read from the file; known after the first read."""
        return self._mapped is not None

    async def read(self, rows: Sequence[Row], columns: Sequence[str]) -> list[Arrays]:
        """One dict of arrays per row; a column that a row does not have is left out."""
        info = await self._connect()
        for row in rows:
            if row.unit != info.unit:
                raise BadRequest(f"row of unit {row.unit}, but this is {info.unit}", "read it from its own unit")
        if self._mapped is None:
            return await self._fetch(rows, columns)
        mapped = self._mapped
        return [_arrays(mapped.read(row.segment, row.offset, row.length, columns)) for row in rows]

    async def _connect(self) -> UnitInfo:
        if self._info is None:
            self._info = await self._client.get("/unit/info", UnitInfo)
            if self._allow_map and _is_here(self._info):
                self._mapped = SegmentReader(Path(self._info.path))
        return self._info

    async def _fetch(self, rows: Sequence[Row], columns: Sequence[str]) -> list[Arrays]:
        found: list[Arrays] = []
        for part in _parts(rows):
            got = await self._client.post("/unit/get", GetRows(rows=part, columns=list(columns)), RowsGot)
            found.extend(_arrays(row) for row in got.rows)
        return found


def _parts(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows in the same order, in parts that a unit answers: few enough, and not too long together."""
    part: list[Row] = []
    size = 0
    for row in rows:
        if part and (len(part) == _ROWS_A_CALL or size + row.length > GET_LIMIT):
            yield part
            part, size = [], 0
        part.append(row)
        size += row.length
    if part:
        yield part


def _is_here(info: UnitInfo) -> bool:
    """The folder can be read on this host and is the same unit, not another one at the same path."""
    try:
        return (Path(info.path) / UNIT_ID_FILE).read_text() == info.unit
    except OSError:
        return False


def _arrays(row: Mapping[str, bytes | memoryview]) -> Arrays:
    return {name: np.frombuffer(data, dtype=COLUMNS[name]) for name, data in row.items()}
