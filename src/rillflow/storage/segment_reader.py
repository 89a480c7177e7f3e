"""Reads records of segment files: by mapping them, or as bytes for those who cannot."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from rillflow.errors import CorruptData, StorageError
from rillflow.storage.records import Arrays, Place, Views, read_record
from rillflow.storage.segments import segment_path

if TYPE_CHECKING:
    from rillflow.storage.records import Dtypes

_MOST_VIEWED = 256  # segments that the views of one read keep mapped; each holds a file open


class SegmentReader:
    """Maps segment files and hands out views into them. Any thread may read.

    A file stays mapped for as long as a view into it is referred to, also after it was dropped, and no longer: a run
    has more segments than a process may open files. For the same reason a read of very many segments gets copies of the
    last ones. This does not protect against a file that is cut, or a disk that fails, in the very moment of a read,
    which ends the process (SIGBUS).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps = WeakValueDictionary[int, mmap.mmap]()
        self._lock = threading.Lock()

    def read(self, places: Sequence[Place], columns: Dtypes) -> list[Arrays | CorruptData]:
        """For every place its columns as views, or what is wrong with it."""
        segments: dict[int, list[int]] = {}
        for n, place in enumerate(places):
            segments.setdefault(place.segment, []).append(n)
        found: list[Arrays | CorruptData] = [{} for _ in places]
        for order, (segment, members) in enumerate(segments.items()):
            for n, one in zip(members, self._read(segment, [places[n] for n in members], columns), strict=True):
                found[n] = _copied(one) if order >= _MOST_VIEWED else one
        return found

    def _read(self, segment: int, places: list[Place], columns: Dtypes) -> list[Arrays | CorruptData]:
        try:
            mapped, end = self._map(segment, max(place.offset + place.length for place in places))
        except CorruptData as error:
            return [error for _ in places]
        end, views = min(end, len(mapped)), Views(mapped, columns)
        return [_try_record(views, end, place) for place in places]

    def _map(self, segment: int, needed: int) -> tuple[mmap.mmap, int]:
        """Return the file and its present end: bytes behind it must not be touched, however much is mapped."""
        with self._lock:
            mapped = self._maps.get(segment)
            path = segment_path(self._folder, segment)
            try:
                with open(path, "rb") as file:
                    end = os.fstat(file.fileno()).st_size
                    if mapped is None or len(mapped) < min(needed, end):
                        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError) as error:
                raise CorruptData(f"segment {segment} of {self._folder} is missing or empty") from error
            except OSError as error:
                raise StorageError(f"cannot read segment {segment} of {self._folder}: {error}") from error
            self._maps[segment] = mapped
            return mapped, end


def _copied(one: Arrays | CorruptData) -> Arrays | CorruptData:
    if isinstance(one, CorruptData):
        return one
    copies = {name: array.copy() for name, array in one.items()}
    for array in copies.values():
        array.flags.writeable = False
    return copies


def _try_record(views: Views, end: int, place: Place) -> Arrays | CorruptData:
    if not 0 <= place.offset <= place.offset + place.length <= end:
        return CorruptData(f"segment {place.segment} ends before {place}", "the unit lost data")
    try:
        return read_record(views, place.offset, place)
    except CorruptData as error:
        return error


def read_range(folder: Path, number: int, start: int, end: int) -> bytes:
    """The bytes [start, end) of a segment, as they are; CorruptData when it does not have them."""
    try:
        with open(segment_path(folder, number), "rb") as file:
            data = os.pread(file.fileno(), end - start, start)
    except FileNotFoundError as error:
        raise CorruptData(f"segment {number} is missing", "the unit lost data") from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise CorruptData(f"the disk cannot read {start}-{end} of segment {number}", "replace the disk") from error
        raise StorageError(f"cannot read segment {number} of {folder}: {error}", "look at the disk") from error
    if len(data) < end - start:
        raise CorruptData(f"segment {number} ends before {end}", "the unit lost data")
    return data
