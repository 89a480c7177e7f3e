"""How much was written into a folder of segments, by whomever."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


class Growth:
    """Counts bytes in segment files. They are preallocated: what counts is where their data ends, not their size.

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
