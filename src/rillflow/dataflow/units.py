"""A storage unit in a folder: payload columns in append-only segments, durable when `put` returns.

The unit's id is drawn once and lies in the folder, so a reader that finds the same path on another host, or the
path of another run, does not take it for this unit.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rillflow.clients.payloads import GET_LIMIT, UNIT_ID_FILE
from rillflow.errors import BadRequest
from rillflow.storage import SegmentReader, SegmentWriter, disk_errors, write_atomic
from rillflow.types import COLUMNS, Row, UnitInfo

_PER_TOKEN = tuple(name for name in COLUMNS if name != "transcript")


class FileUnit:
    """Implements contracts.StorageUnit. `put` is called by one thread at a time; `get` by any."""

    def __init__(self, folder: Path, name: str = "0") -> None:
        self._folder = folder.resolve()
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._id = self._identify(name)
        self._writer = SegmentWriter(self._folder)
        self._reader = SegmentReader(self._folder)

    def _identify(self, name: str) -> str:
        path = self._folder / UNIT_ID_FILE
        if not path.exists():
            write_atomic(path, f"{name}-{secrets.token_hex(4)}".encode())
        return path.read_text()

    def put(self, rows: Sequence[Mapping[str, bytes]]) -> list[Row]:
        for row in rows:
            check_columns(row)
        places = [self._writer.append(row) for row in rows]
        self._writer.sync()
        return [Row(unit=self._id, segment=s, offset=o, length=n) for s, o, n in places]

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        _check_names(columns)
        if sum(row.length for row in rows) > GET_LIMIT:
            raise BadRequest(f"the rows are larger than {GET_LIMIT} bytes together", "ask for fewer rows at once")
        return [self._get(row, columns) for row in rows]

    def _get(self, row: Row, columns: Sequence[str]) -> dict[str, bytes]:
        if row.unit != self._id:
            raise BadRequest(f"this unit is {self._id}, not {row.unit}", "ask the unit that the row names")
        if min(row.segment, row.offset, row.length) < 0:
            raise BadRequest(f"there is no row {row}", "use a row that a put has returned")
        views = self._reader.read(row.segment, row.offset, row.length, columns)
        return {name: bytes(view) for name, view in views.items()}

    def info(self) -> UnitInfo:
        return UnitInfo(unit=self._id, path=str(self._folder))

    def close(self) -> None:
        self._writer.close()


def _check_names(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise BadRequest(f"unknown columns {unknown!r:.80}", f"the columns are {', '.join(COLUMNS)}")


def check_columns(row: Mapping[str, bytes]) -> None:
    """Known names, whole elements, and the same number of tokens in every column that has one value a token."""
    _check_names(list(row))
    counts: dict[str, int] = {}
    for name, data in row.items():
        width = np.dtype(COLUMNS[name]).itemsize
        if len(data) % width:
            raise BadRequest(f"column {name} has {len(data)} bytes", f"its elements have {width} bytes each")
        if name in _PER_TOKEN:
            counts[name] = len(data) // width
    if len(set(counts.values())) > 1:
        raise BadRequest(f"columns of one row differ in length: {counts}", "every column has one value a token")
