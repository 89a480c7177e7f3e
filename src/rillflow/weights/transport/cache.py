"""Files on the reader's disk: partial files that are being fetched, and a bounded cache of fetched ones.

    .model.safetensors.part, .model.safetensors.part.json      a partial file and the record of its bytes

Invariants: the record never lists bytes that were not written, so a restarted process continues from it; a file gets
its name only after its size and hash were verified; a power failure may keep the record and lose bytes: then the hash
fails and the file is fetched again. The cache never removes files in use; the least recently used goes first, also
after a restart (a file's time is that of its last use); room is made in advance, and a partial file counts with its
full size.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rillflow.errors import CorruptData, DiskFull
from rillflow.storage import disk_errors, file_hash, fsync_folder
from rillflow.types.base import json_decoder
from rillflow.weights.sealed import FileFacts

Span = tuple[int, int]


class Spans:
    """Disjoint half-open spans of bytes, in order."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:  # merge the spans that touch it
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def reach(self, start: int) -> int:
        """Return the end of the bytes from `start` on without a gap; `start` itself if none follow."""
        found = bisect.bisect_right(self._starts, start) - 1
        return max(start, self._ends[found]) if found >= 0 else start

    def missing(self, size: int) -> list[Span]:
        """Return the missing spans of the first `size` bytes."""
        borders = [0, *(at for span in zip(self._starts, self._ends, strict=True) for at in span), size]
        pairs = zip(borders[::2], borders[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    def __iter__(self) -> Iterator[Span]:
        return iter(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        """Return the number of bytes."""
        return sum(self._ends) - sum(self._starts)


class _Record(msgspec.Struct, frozen=True):
    sha256: str
    size: int
    have: list[Span]


class PartFile:
    """A partial file. Threads may call `write` for disjoint places; all other calls come from one thread."""

    def __init__(self, target: Path, facts: FileFacts) -> None:
        self.target = target
        self.facts = facts
        self.path = target.with_name(f".{target.name}.part")
        self._record = target.with_name(f".{target.name}.part.json")
        with disk_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.have = self._known()
            self._at = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            os.ftruncate(self._at, facts.size)

    def _known(self) -> Spans:
        try:
            record = json_decoder(_Record).decode(self._record.read_bytes())
            whole = self.path.stat().st_size == record.size
        except (OSError, msgspec.MsgspecError):
            return Spans()
        same = whole and (record.sha256, record.size) == (self.facts.sha256, self.facts.size)
        valid = all(0 <= start < end <= record.size for start, end in record.have)
        return Spans(record.have) if same and valid else Spans()

    def write(self, start: int, data: bytes) -> None:
        with disk_errors(self.path):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._at, view, start)
                start, view = start + written, view[written:]

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._at, size, start)

    def note(self) -> None:
        """Write the record. Atomic but not durable: the hash is checked at the end."""
        facts = self.facts
        record = msgspec.json.encode(_Record(sha256=facts.sha256, size=facts.size, have=list(self.have)))
        fresh = self._record.with_suffix(".tmp")
        with disk_errors(self._record):
            fresh.write_bytes(record)
            os.replace(fresh, self._record)

    def finish(self) -> Path:
        """Give the file its name; CorruptData if it is not the published file."""
        with disk_errors(self.target):
            os.fsync(self._at)
            if file_hash(self.path) != self.facts.sha256:
                raise CorruptData(f"the fetched {self.target.name} does not match its hash", "fetch it again")
            os.replace(self.path, self.target)
            self._record.unlink(missing_ok=True)
            fsync_folder(self.target.parent)
        return self.target

    def restart(self) -> None:
        """Discard all bytes."""
        self.have = Spans()
        self.note()

    def close(self) -> None:
        os.close(self._at)


# ---------------------------------------------------------------- the cache


KEPT_FREE = 64 << 20  # bytes of the disk that stay free


def is_whole(path: Path, facts: FileFacts) -> bool:
    """Return whether an earlier process has fetched the file and its content is intact."""
    try:
        return path.stat().st_size == facts.size and file_hash(path) == facts.sha256
    except OSError:
        return False


class FileCache:
    """A folder of files that can be fetched again, with at most `limit` bytes (None: as much as the disk has)."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit
        self._uses: Counter[Path] = Counter()

    @contextmanager
    def used(self, path: Path) -> Iterator[None]:
        """Keep the file at `path`, and its partial file, meanwhile."""
        self.take(path)
        try:
            yield
        finally:
            self.leave(path)

    def take(self, path: Path) -> None:
        self._uses[path] += 1
        with suppress(OSError):  # opening the file will report the error
            os.utime(path)

    def leave(self, path: Path) -> None:
        self._uses[path] -= 1
        if not self._uses[path]:
            del self._uses[path]

    def make_room(self, target: Path, size: int) -> None:
        """Make room for a file of `size` bytes at `target`; DiskFull if that is impossible."""
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
                f"{self.folder} has no room for {size} bytes of {target.name}",
                "give the cache a higher limit or a larger disk",
            )

    def remove(self, folder: Path) -> None:
        """Remove the files of a version's folder that are not in use."""
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
