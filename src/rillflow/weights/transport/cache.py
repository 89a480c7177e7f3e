"""Files that were fetched and can be fetched again, in a folder that stays below a bound.

Invariants: what is in use is never removed; the least lately used goes first, also after a restart (a file's time is
that of its last use); room is made before it is taken, and what is being fetched counts with its full size.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rillflow.errors import DiskFull

KEPT_FREE = 64 << 20  # bytes of the disk that are left to others


class FileCache:
    """`limit` None: as much as the disk has."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit
        self._uses: Counter[Path] = Counter()

    @contextmanager
    def used(self, path: Path) -> Iterator[None]:
        """What lies at `path`, and what is fetched of it, stays meanwhile."""
        self.take(path)
        try:
            yield
        finally:
            self.leave(path)

    def take(self, path: Path) -> None:
        self._uses[path] += 1
        with suppress(OSError):  # who opens it hears of it
            os.utime(path)

    def leave(self, path: Path) -> None:
        self._uses[path] -= 1
        if not self._uses[path]:
            del self._uses[path]

    def make_room(self, target: Path, size: int) -> None:
        """For a file of `size` bytes at `target`; DiskFull when it cannot be made."""
        files = self._files()
        files.pop(target.with_name(f".{target.name}.part"), None)  # its room was made before
        taken = sum(status.st_size for status in files.values())
        room = float("inf") if self.limit is None else self.limit - taken
        free = self._free()
        for path, status in sorted(files.items(), key=lambda item: item[1].st_mtime_ns):
            if size <= min(room, free):
                return
            if not self._in_use(path):
                path.unlink(missing_ok=True)
                room, free = room + status.st_size, free + status.st_blocks * 512
        if size > min(room, free):
            raise DiskFull(
                f"there is no room for {size} bytes of {target.name} in {self.folder}",
                "give the cache more room, or a disk that has it",
            )

    def remove(self, folder: Path) -> None:
        """A version's folder, as far as nothing of it is in use."""
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in list(folder.iterdir()):
                if not self._in_use(path):
                    path.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()

    def _in_use(self, path: Path) -> bool:
        if self._uses[path]:
            return True
        name = path.name
        part = name.startswith(".") and ".part" in name
        return part and self._uses[path.with_name(name[1 : name.rindex(".part")])] > 0

    def _files(self) -> dict[Path, os.stat_result]:
        found: dict[Path, os.stat_result] = {}
        for at, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):
                    found[Path(at, name)] = os.lstat(os.path.join(at, name))
        return found

    def _free(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize - KEPT_FREE
