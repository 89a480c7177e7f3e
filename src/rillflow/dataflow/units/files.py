"""A storage unit in a folder: payload columns in append-only segments.

The unit's id is drawn once and lies in the folder, so a reader that finds the same path on another host, or the path of
another run, does not take it for this unit. Processes on this host may write into the folder beside the unit
(`clients.units.LocalWriter`).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.clients.unit_directory import GET_LIMIT, UNIT_ID_FILE, check_rows, dtypes_of
from rillflow.clients.units import LocalWriter
from rillflow.errors import BadRequest, CorruptData
from rillflow.storage import SegmentReader, disk_errors, write_atomic
from rillflow.storage.records import Place
from rillflow.storage.segment_reader import read_range
from rillflow.storage.segments import SEGMENT_BYTES, closed_segments, drop_segments, segment_numbers, segment_path
from rillflow.types import Durability, Row, UnitInfo

if TYPE_CHECKING:
    from rillflow.contracts import Buffer


class FileUnit:
    """Implements contracts.StorageUnit. Any thread may call; puts follow one another."""

    def __init__(
        self,
        folder: Path,
        name: str = "0",
        *,
        segment_bytes: int = SEGMENT_BYTES,
        durability: Durability = "process",
    ) -> None:
        self._folder = folder.resolve()
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not (self._folder / UNIT_ID_FILE).exists():
                write_atomic(self._folder / UNIT_ID_FILE, f"{name}-{secrets.token_hex(4)}".encode())
        self._writer = LocalWriter(self._folder, segment_bytes=segment_bytes, durability=durability)
        self._reader = SegmentReader(self._folder)
        self._durability = durability
        self._growth = Growth(self._folder)

    def put(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Row]:
        check_rows(rows)
        return self._writer.put(rows)

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        dtypes = dtypes_of(columns)
        check_asked(rows, self._writer.unit)
        got: list[dict[str, bytes]] = []
        for one in self._reader.read([Place(row.segment, row.offset, row.length) for row in rows], dtypes):
            if isinstance(one, CorruptData):
                raise one
            got.append({name: array.tobytes() for name, array in one.items()})
        return got

    def read_range(self, segment: int, start: int, end: int) -> bytes:
        """Raw bytes [start, end) of a segment, for readers on other hosts, which verify them."""
        if not 0 <= start < end or end - start > GET_LIMIT:
            raise BadRequest(f"there is no range {start}-{end}", f"ask for 1 to {GET_LIMIT} bytes")
        return read_range(self._folder, segment, start, end)

    def drop(self, segments: Sequence[int]) -> None:
        """Segments that are still being written stay: see `remaining`."""
        drop_segments(self._folder, segments)

    def closed(self, segments: Sequence[int]) -> list[int]:
        return closed_segments(self._folder, segments)

    def found(self) -> list[int]:
        return closed_segments(self._folder, segment_numbers(self._folder))

    def remaining(self, segments: Sequence[int]) -> list[int]:
        return [number for number in segments if segment_path(self._folder, number).exists()]

    def written(self) -> int:
        return self._growth.count()

    def info(self) -> UnitInfo:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        return UnitInfo(
            unit=self._writer.unit, path=str(self._folder), kind="files", free=free, durability=self._durability
        )

    def close(self) -> None:
        self._writer.close()


def check_asked(rows: Sequence[Row], unit: str) -> None:
    """Rows of this unit, at places that can exist, and not too many bytes at once."""
    for row in rows:
        if row.unit != unit:
            raise BadRequest(f"this unit is {unit}, not {row.unit}", "ask the unit that the row names")
        if min(row.segment, row.offset, row.length) < 0:
            raise BadRequest(f"there is no row {row}", "use a row that a put has returned")
    if sum(row.length for row in rows) > GET_LIMIT:
        raise BadRequest(f"the rows are larger than {GET_LIMIT} bytes together", "ask for fewer rows at once")


class Growth:
    """Counts the bytes that any process has written into a folder of segments.

    The files are preallocated: what counts is where their data ends, not their size.

    Any thread may count.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[str, tuple[int, int]] = {}  # by file name: when it was changed last, where its data ended
        self._total = 0
        self._lock = threading.Lock()
        self.count()
        self._total = 0  # existing bytes do not count as growth

    def count(self) -> int:
        """Bytes written since the start."""
        seen: dict[str, tuple[int, int]] = {}
        with self._lock, os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".seg"):
                    with suppress(FileNotFoundError):  # dropped in this moment
                        seen[entry.name] = self._look(entry)
            self._ends = seen
            return self._total

    def _look(self, entry: os.DirEntry[str]) -> tuple[int, int]:
        changed, end = self._ends.get(entry.name, (-1, 0))
        now = entry.stat().st_mtime_ns
        if now == changed:
            return changed, end
        found = max(end, _data_end(entry.path, end))
        self._total += found - end
        return now, found


def _data_end(path: str, start: int) -> int:
    """Return the offset of the first hole from `start` on; the end of the file on a file system without holes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(descriptor, start, os.SEEK_HOLE)
    except OSError:  # `start` lies behind the end: nothing was added
        return start
    finally:
        os.close(descriptor)
