"""Append-only segment files of checksummed records, in a folder that several processes may write into at once.

What `sync` has returned for survives kill -9 and power failure. Every writer has files of its own, made exclusively
and locked while they are open, so a file that an earlier writer left, torn or damaged, is never touched again, and
one that is still written is never dropped. A number is used once in the life of a folder, also after its file was
dropped. A reader never returns bytes whose checksum does not match.

Files are preallocated to their limit, or those of dropped segments (see `recycling`), and written in place, which
spares the disk the bookkeeping of growth at every sync; they are cut to what they hold when they are closed. Old bytes
in them are no records: see `records`.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rillflow.errors import CorruptData, DiskFull
from rillflow.storage.files import disk_errors, fsync_folder, write_atomic
from rillflow.storage.records import Place, Sealed, seal, view_of
from rillflow.storage.recycling import discard, is_at, keep, reuse

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

SEGMENT_BYTES = 64 << 20
DROPPED_FILE = "dropped"  # the highest number that was dropped
_MOST_BEHIND = 6  # jobs that may wait in the background: a full file and a new one are a job each
_WRITE_BYTES = 4 << 20  # handed over at once: measured fastest; what was just checksummed is still in the cache
_PUSH_BYTES = 16 << 20  # sent to the disk at once, ahead of the sync
_IOV_MAX = os.sysconf("SC_IOV_MAX")


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def segment_numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.seg") if path.stem.isdecimal()]


def _highest_dropped(folder: Path) -> int:
    path = folder / DROPPED_FILE
    try:
        return int(path.read_bytes())
    except FileNotFoundError:
        return -1
    except ValueError as error:
        raise CorruptData(f"{path} holds no number", "write the highest segment number ever used into it") from error


def drop_segments(folder: Path, numbers: Sequence[int]) -> None:
    """Remove these files, except those that a writer still has open; numbers without a file are passed over.

    Called by one process at a time. The highest number is on disk before any file is gone (see `_SegmentFile.create`),
    unless the disk is so full that others must go first; the file of the highest still holds its number until then.
    """
    there = sorted(number for number in numbers if segment_path(folder, number).exists())
    if not there:
        return
    if there[-1] > _highest_dropped(folder):
        marker = str(there[-1]).encode()
        try:
            write_atomic(folder / DROPPED_FILE, marker)
        except DiskFull:
            with disk_errors(folder):
                discard(folder)
            _remove(folder, there[:-1], keep=lambda path: False)
            write_atomic(folder / DROPPED_FILE, marker)
    _remove(folder, there)


def _remove(folder: Path, numbers: Sequence[int], keep: Callable[[Path], bool] = keep) -> None:
    """Some are kept for other segments to be written over them."""
    with disk_errors(folder):
        for number in numbers:
            path = segment_path(folder, number)
            with _unwritten(folder, number) as free:
                if free and path.exists() and not keep(path):
                    path.unlink(missing_ok=True)
        fsync_folder(folder)


def closed_segments(folder: Path, numbers: Sequence[int]) -> list[int]:
    """Those that no process writes into, or that are gone: nothing will ever be added to them."""
    found = []
    with disk_errors(folder):
        for number in numbers:
            with _unwritten(folder, number) as free:
                if free:
                    found.append(number)
    return found


@contextmanager
def _unwritten(folder: Path, number: int) -> Iterator[bool]:
    """Whether nobody writes into the segment; a writer holds its lock until it has left the file for good."""
    try:
        descriptor = os.open(segment_path(folder, number), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Not the file that we have opened: a writer has put another in its place meanwhile (see `reuse`).
        free = is_at(descriptor, segment_path(folder, number)) or not segment_path(folder, number).exists()
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)


class _SegmentFile:
    """One open file. `end` is where the next record goes, `synced` the end of what is known to be durable."""

    def __init__(self, descriptor: int, number: int) -> None:
        self.number = number
        self.end = 0
        self.synced = 0
        self._descriptor = descriptor
        self._waiting: list[memoryview | bytes] = []
        self._handed = 0  # where the first of the waiting goes
        self._pushed = 0  # how far it was sent to the disk ahead of a sync
        self._writing: list[Future[None]] = []

    @classmethod
    def create(cls, folder: Path, limit: int) -> _SegmentFile:
        """The next file that nobody has or had."""
        # Files first, then the highest dropped: what is dropped in between is seen in one of the two.
        number = max(segment_numbers(folder), default=-1)
        number = max(number, _highest_dropped(folder))
        while True:
            number += 1
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(segment_path(folder, number), flags, 0o644)
            except FileExistsError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _highest_dropped(folder) < number:
                    if (kept := reuse(segment_path(folder, number))) is not None:
                        os.close(descriptor)
                        descriptor = kept
                    _preallocate(descriptor, limit)
                    return cls(descriptor, number)
                # Somebody had this number, and it was dropped while we looked.
                segment_path(folder, number).unlink()
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def add(self, record: Sealed, writes: ThreadPoolExecutor, syncs: ThreadPoolExecutor) -> Place:
        """Long records are handed to the operating system, and sent to the disk, while the next ones are sealed."""
        place = Place(self.number, self.end, record.length)
        self._waiting.append(record.start(self.number, self.end))
        self._waiting.extend(record.buffers)
        self.end += record.length
        if self.end - self._handed >= _WRITE_BYTES:
            buffers, start = self._take()
            written = writes.submit(_write_all, self._descriptor, buffers, start)
            self._writing.append(written)
            if self.end - self._pushed >= _PUSH_BYTES:
                self._pushed = self.end
                self._writing.append(syncs.submit(self._push, written))
        return place

    def _push(self, written: Future[None]) -> None:
        """The disk works while more is written; the sync that counts finds little left to do."""
        written.result()
        os.fdatasync(self._descriptor)

    def flush(self) -> None:
        """All that was added is handed to the operating system."""
        buffers, start = self._take()
        _write_all(self._descriptor, buffers, start)
        while self._writing:
            self._writing.pop().result()

    def _take(self) -> tuple[list[memoryview | bytes], int]:
        taken, start = self._waiting, self._handed
        self._waiting, self._handed = [], self.end
        return taken, start

    def sync(self) -> None:
        self.flush()
        os.fdatasync(self._descriptor)
        self.synced = self.end

    def finish(self) -> None:
        """Sync, give back what was preallocated and close."""
        try:
            self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close, keeping only what is known to be durable: the file may end in half a record."""
        self._waiting = []
        while self._writing:
            self._writing.pop().exception()
        with suppress(OSError):
            os.ftruncate(self._descriptor, self.synced)
        os.close(self._descriptor)


def _write_all(descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
    """Write the buffers one behind the other, without joining them."""
    for first in range(0, len(buffers), _IOV_MAX):
        left = buffers[first : first + _IOV_MAX]
        while left:
            count = os.pwritev(descriptor, left, offset)
            offset += count
            left = _behind(left, count)


def _behind(buffers: Sequence[memoryview | bytes], count: int) -> Sequence[memoryview | bytes]:
    """What is left of the buffers when the system took only their first `count` bytes."""
    for n, buffer in enumerate(buffers):
        size = memoryview(buffer).nbytes
        if count < size:
            return [view_of(np.frombuffer(buffer, np.uint8)[count:]), *buffers[n + 1 :]]
        count -= size
    return []


def _preallocate(descriptor: int, limit: int) -> None:
    """Only a help: where it is refused, the file grows as it is written, and the write says what is wrong."""
    try:
        os.posix_fallocate(descriptor, 0, limit)
    except OSError:
        os.ftruncate(descriptor, 0)


class SegmentWriter:
    """Writes records into numbered files of a folder, starting a new file after `limit` bytes. Not thread-safe.

    After an error nothing that was written since the last `sync` counts, and the next write starts a new file.
    """

    def __init__(self, folder: Path, limit: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._file: _SegmentFile | None = None
        self._writes = ThreadPoolExecutor(1, "segment-writes")
        # Full files are synced, and new ones entered into the folder, while the next is written.
        self._syncs = ThreadPoolExecutor(1, "segment-syncs")
        self._syncing: deque[Future[None]] = deque()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Place]:
        """Durable only after `sync`."""
        try:
            with disk_errors(self._folder):
                places = [self._add(seal(row)) for row in rows]
                if self._file is not None:
                    self._file.flush()
                return places
        except BaseException:
            self._abandon()
            raise

    def sync(self) -> None:
        try:
            with disk_errors(self._folder):
                if self._file is not None and self._file.synced < self._file.end:
                    self._file.sync()
                self._settle(0)
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        self._abandon()
        self._writes.shutdown()
        self._syncs.shutdown()

    def _add(self, record: Sealed) -> Place:
        if self._file is not None and self._file.end + record.length > self._limit:
            self._settle(_MOST_BEHIND)
            full, self._file = self._file, None
            self._syncing.append(self._syncs.submit(full.finish))
        if self._file is None:
            self._file = _SegmentFile.create(self._folder, max(self._limit, record.length))
            self._syncing.append(self._syncs.submit(fsync_folder, self._folder))
        return self._file.add(record, self._writes, self._syncs)

    def _settle(self, most: int) -> None:
        """Wait until at most so many background jobs are left."""
        while len(self._syncing) > most:
            self._syncing.popleft().result()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        while self._syncing:
            self._syncing.popleft().exception()
