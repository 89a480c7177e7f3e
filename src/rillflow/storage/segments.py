"""Append-only segment files of checksummed records, in a folder that several processes may write into at once.

What `write` has returned survives kill -9 of any process, and with the durability `machine` a power failure too: then
it is synced first. With `process` it is in the page cache of its file; a power failure may take it, which a reader sees
by its checksums.

Every writer has files of its own, made exclusively and locked while they are open, so a file that an earlier writer
left, torn or damaged, is never touched again, and one that is still written is never dropped. A number is used once in
the life of a folder, also after its file was dropped and after a power failure: with either durability the folder is
synced before anything in a new file is acknowledged, so that no other record can ever lie where an old one was.

Files are preallocated to their limit and written in place, which spares the disk the bookkeeping of growth at every
sync; they are cut to what they hold when they are closed.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rillflow.errors import CorruptData, DiskFull
from rillflow.storage.files import disk_errors, fsync_folder, write_atomic
from rillflow.storage.records import Place, Sealed, seal, view_of
from rillflow.types import Durability

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

SEGMENT_BYTES = 64 << 20
DROPPED_FILE = "dropped"  # the highest number that was dropped
_MOST_BEHIND = 6  # jobs that may wait in the background: a full file and a new one are a job each
_WRITE_BYTES = 4 << 20  # bytes per write: measured fastest; checksummed bytes are still in the cache
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
    existing = sorted(number for number in numbers if segment_path(folder, number).exists())
    if not existing:
        return
    if existing[-1] > _highest_dropped(folder):
        marker = str(existing[-1]).encode()
        try:
            write_atomic(folder / DROPPED_FILE, marker)
        except DiskFull:
            _remove(folder, existing[:-1])
            write_atomic(folder / DROPPED_FILE, marker)
    _remove(folder, existing)


def _remove(folder: Path, numbers: Sequence[int]) -> None:
    with disk_errors(folder):
        for number in numbers:
            with _unwritten(folder, number) as free:
                if free:
                    segment_path(folder, number).unlink(missing_ok=True)
        fsync_folder(folder)


def closed_segments(folder: Path, numbers: Sequence[int]) -> list[int]:
    """Return those that no process writes into, or that are gone: nothing will ever be added to them."""
    found = []
    with disk_errors(folder):
        for number in numbers:
            with _unwritten(folder, number) as free:
                if free:
                    found.append(number)
    return found


@contextmanager
def _unwritten(folder: Path, number: int) -> Iterator[bool]:
    """Yield whether the segment is closed; a writer holds its lock until it has left the file permanently."""
    try:
        descriptor = os.open(segment_path(folder, number), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)


class _Threads(NamedTuple):
    """The threads that work for one file: one writes long records, the other syncs."""

    writes: ThreadPoolExecutor
    syncs: ThreadPoolExecutor


class _SegmentFile:
    """One open file. `end` is where the next record goes, `kept` the end of what was acknowledged."""

    def __init__(self, descriptor: int, path: Path, number: int, synced: bool, threads: _Threads) -> None:
        self.number = number
        self.end = 0
        self.kept = 0
        self._descriptor = descriptor
        self._path = path
        self._synced = synced
        self._threads = threads
        self._waiting: list[Buffer] = []
        self._handed = 0  # where the first of the waiting goes
        self._pushed = 0  # how far it was sent to the disk ahead of a sync
        self._writing: list[Future[None]] = []

    @classmethod
    def create(cls, folder: Path, limit: int, synced: bool, mode: int, threads: _Threads) -> _SegmentFile:
        """Return the next file, with a number that was never used."""
        # Files first, then the highest dropped: a segment dropped in between is seen in one of the two.
        number = max(segment_numbers(folder), default=-1)
        number = max(number, _highest_dropped(folder))
        while True:
            number += 1
            path = segment_path(folder, number)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except FileExistsError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _highest_dropped(folder) < number:
                    _preallocate(descriptor, limit)
                    return cls(descriptor, path, number, synced, threads)
                # Another writer had this number, and it was dropped meanwhile.
                path.unlink()
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def add(self, record: Sealed) -> Place:
        """Add a record. Long ones are written, and sent to the disk, while the next ones are sealed."""
        place = Place(self.number, self.end, record.length)
        self._waiting.append(record.start(self.number, self.end))
        self._waiting.extend(record.buffers)
        self.end += record.length
        if self.end - self._handed >= _WRITE_BYTES:
            buffers, start = self._take()
            written = self._threads.writes.submit(_write_all, self._descriptor, buffers, start)
            self._writing.append(written)
            if self._synced and self.end - self._pushed >= _PUSH_BYTES:
                self._pushed = self.end
                self._writing.append(self._threads.syncs.submit(self._push, written))
        return place

    def _push(self, written: Future[None]) -> None:
        """Sync while more is written, so that the sync that counts finds little left to do."""
        written.result()
        os.fdatasync(self._descriptor)

    def _take(self) -> tuple[list[Buffer], int]:
        taken, start = self._waiting, self._handed
        self._waiting, self._handed = [], self.end
        return taken, start

    def flush(self) -> None:
        """Make everything that was added as durable as was asked for."""
        buffers, start = self._take()
        _write_all(self._descriptor, buffers, start)
        while self._writing:
            self._writing.pop().result()
        if self._synced:
            os.fdatasync(self._descriptor)

    def finish(self) -> None:
        """Flush, give back what was preallocated and close."""
        try:
            self.flush()
            self.kept = self.end
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file, cut to what was acknowledged; a file of which nothing was is removed."""
        self._waiting = []
        while self._writing:
            self._writing.pop().exception()
        with suppress(OSError):
            if not self.kept:
                self._path.unlink()
            os.ftruncate(self._descriptor, self.kept)
            if self._synced and self.kept < self.end:
                os.fsync(self._descriptor)  # a record that was refused must not come back
        os.close(self._descriptor)


def _write_all(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write the buffers one behind the other, without joining them."""
    for first in range(0, len(buffers), _IOV_MAX):
        left = buffers[first : first + _IOV_MAX]
        while left:
            count = os.pwritev(descriptor, left, offset)  # type: ignore[arg-type]  # see `view_of`
            offset += count
            left = _behind(left, count)


def _behind(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    """Return what is left of the buffers when the system took only their first `count` bytes."""
    for n, buffer in enumerate(buffers):
        view = view_of(buffer).cast("B")
        if count < view.nbytes:
            return [view[count:], *buffers[n + 1 :]]
        count -= view.nbytes
    return []


def _preallocate(descriptor: int, limit: int) -> None:
    """Only a help: where it is refused, the file grows as it is written, and the write says what is wrong."""
    try:
        os.posix_fallocate(descriptor, 0, limit)
    except OSError:
        os.ftruncate(descriptor, 0)


class SegmentWriter:
    """Writes records into numbered files of a folder, starting a new file after `limit` bytes. Not thread-safe.

    After an error nothing of the failed write counts, and the next write starts a new file. `private` files can be read
    by their owner alone.
    """

    def __init__(
        self,
        folder: Path,
        limit: int = SEGMENT_BYTES,
        durability: Durability = "process",
        *,
        private: bool = False,
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._synced = durability == "machine"
        self._mode = 0o600 if private else 0o644
        self._file: _SegmentFile | None = None
        # Full files are finished, and new ones entered into the folder, while the next is written.
        self._background = ThreadPoolExecutor(1, "segment-syncs")
        # Files take turns between two threads, because the kernel lets one thread at a time write into a file.
        self._threads = deque(_Threads(ThreadPoolExecutor(1, "segment-writes"), self._background) for _ in range(2))
        self._jobs: deque[Future[None]] = deque()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def appends(self, size: int) -> bool:
        """Return whether columns of `size` bytes would be written into the open file, and nothing synced for them."""
        return not self._synced and self._file is not None and self._file.end + 2 * size < self._limit

    def write(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Place]:
        """Write one record for each row; they are as durable as was asked for when this returns."""
        with self._all_or_nothing():
            return [self._add(seal(row)) for row in rows]

    def write_together(self, rows: Sequence[Mapping[str, Buffer]]) -> int:
        """Write the rows into one file, so that either all are found later or none; return the file's number."""
        records = [seal(row) for row in rows]
        with self._all_or_nothing():
            self._make_room(sum(record.length for record in records))
            file = self._file or self._create(self._limit)
            for record in records:
                file.add(record)
            return file.number

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Acknowledge what is added within, or leave the file that has some of it."""
        try:
            with disk_errors(self._folder):
                yield
                if self._file is not None:
                    self._file.flush()
                self._settle(0)
                if self._file is not None:
                    self._file.kept = self._file.end
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        self._abandon()
        for threads in self._threads:
            threads.writes.shutdown()
        self._background.shutdown()

    def _add(self, record: Sealed) -> Place:
        self._make_room(record.length)
        file = self._file or self._create(max(self._limit, record.length))
        return file.add(record)

    def _create(self, limit: int) -> _SegmentFile:
        self._threads.rotate()
        self._file = _SegmentFile.create(self._folder, limit, self._synced, self._mode, self._threads[0])
        self._jobs.append(self._background.submit(fsync_folder, self._folder))
        return self._file

    def _make_room(self, length: int) -> None:
        """Leave a file in which `length` bytes have no room; it is finished in the background."""
        if self._file is not None and self._file.end + length > self._limit:
            self._settle(_MOST_BEHIND)
            full, self._file = self._file, None
            self._jobs.append(self._background.submit(full.finish))

    def _settle(self, most: int) -> None:
        """Wait until at most `most` background jobs are left."""
        while len(self._jobs) > most:
            self._jobs.popleft().result()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        while self._jobs:
            self._jobs.popleft().exception()
