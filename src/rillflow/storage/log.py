"""An append-only log of frames, each of which belongs to an owner, in numbered files of a folder.

What `sync` was awaited for is on disk. Frames that come while a write is under way share the next one, so that
many owners pay for one sync. A write that fails is cut away again, and with it everything that was added behind it:
what is in the log is always all that was added up to some moment; but for frames that are *owed*, which nobody would
add again: the next write brings them along. A file goes once none of its owners is alive.

A frame is believed only where its checksums match, and they are bound to its place. Reading tells a torn tail (a
process or a machine died while it wrote: nobody was told that this was kept) from damage, and names the owners who
lost something: the frame's own, or where a header is damaged, and with it the way to the next one, all that are alive.

Layout of a frame (little-endian; files are preallocated, so the rest of a file may be zeros; a frame's last
byte is none, so that its end can be told from them):
    u32 xxh3 of file number, offset and the rest of the header | u32 payload length | u32 owner | u8 kind |
    u64 xxh3 of the payload || payload | u8 255
What this does not protect against: a file that is lost or cut back as a whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from rillflow.errors import RillflowError, RunError, StorageError, Unavailable
from rillflow.storage.files import disk_errors, fsync_folder

FILE_BYTES = 64 << 20
PENDING_BYTES = 256 << 20
END = 0  # the kind of an owner's last frame

_HEADER = struct.Struct("<IIIBQ")
_CHECKED = struct.Struct("<QQIIBQ")  # file, offset, then the header without its checksum
_LAST = b"\xff"

log = logging.getLogger(__name__)


class Frame(NamedTuple):
    owner: int
    kind: int
    payload: bytes


class Damage(NamedTuple):
    """A frame of `owner` cannot be read, or may be missing."""

    owner: int
    what: str


def frame_bytes(file: int, offset: int, frame: Frame) -> bytes:
    """A frame as it lies at this place."""
    owner, kind, payload = frame
    rest = (len(payload), owner, kind, xxh3_64_intdigest(payload))
    return b"".join((_HEADER.pack(_header_sum(file, offset, rest), *rest), payload, _LAST))


def _header_sum(file: int, offset: int, rest: Sequence[int]) -> int:
    return xxh3_64_intdigest(_CHECKED.pack(file, offset, *rest)) & 0xFFFFFFFF


def read_frames(file: int, data: bytes) -> Iterator[Frame | Damage | None]:
    """The frames of one file; None, at last, where a damaged header hides what follows."""
    at, end = 0, len(data.rstrip(b"\0"))
    while at < end:
        if at + _HEADER.size > end:
            return  # torn: only the last frame can be this short
        checksum, *rest = _HEADER.unpack_from(data, at)
        if _header_sum(file, at, rest) != checksum:
            yield None
            return
        length, owner, kind, payload_sum = rest
        start = at + _HEADER.size
        at = start + length + len(_LAST)
        if at > end:
            return  # torn
        payload = data[start : start + length]
        if xxh3_64_intdigest(payload) == payload_sum:
            yield Frame(owner, kind, payload)
        else:
            yield Damage(owner, f"a frame of {length} bytes at {start} in file {file} does not match its checksum")


def file_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def file_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.log") if path.stem.isdecimal())


@dataclass(slots=True)
class _Batch:
    """Frames that share a write, whom to tell that they are kept, and whom that they are lost."""

    frames: list[Frame] = field(default_factory=list)
    owed: list[Frame] = field(default_factory=list)  # those of the frames that are told only once
    size: int = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    losses: list[Callable[[], None]] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        for lost in self.losses:
            lost()
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # not everybody who may ask for it does

    def kept(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(slots=True)
class _Holding:
    """Whose frames a file has, and who ended in it."""

    owners: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class _Tail:
    """The file that is written, by one thread: every write is on disk when it returns, or cut away."""

    def __init__(self, folder: Path, number: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._next = number
        self._number = -1
        self._descriptor = -1
        self._end = 0

    def write(self, frames: list[Frame]) -> int:
        """Returns the number of the file that got them, always one for all."""
        with disk_errors(self._folder):
            size = sum(len(frame.payload) + _HEADER.size + len(_LAST) for frame in frames)
            if self._end and self._end + size > self._limit:
                self.close()
            if self._descriptor < 0:
                self._create()
            data, at = [], self._end
            for frame in frames:
                data.append(frame_bytes(self._number, at, frame))
                at += len(data[-1])
            try:
                self._put(b"".join(data))
            except BaseException:
                self._cut()
                raise
            self._end = at
            return self._number

    def _put(self, data: bytes) -> None:
        left, at = memoryview(data), self._end
        while left:
            count = os.pwrite(self._descriptor, left, at)
            left, at = left[count:], at + count

    def _cut(self) -> None:
        """Nothing of the failed write may be found later. A file that cannot be cut is not written any more."""
        try:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
        except OSError:
            descriptor, self._descriptor, self._end = self._descriptor, -1, 0
            os.close(descriptor)

    def _create(self) -> None:
        # Each write returns when it is on disk, data and length: one system call instead of two.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DSYNC
        path = file_path(self._folder, self._next)
        descriptor = os.open(path, flags, 0o600)
        try:
            with suppress(OSError):  # only a help: without it the file grows as it is written
                os.posix_fallocate(descriptor, 0, self._limit)
            fsync_folder(self._folder)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        self._descriptor, self._number, self._end = descriptor, self._next, 0
        self._next += 1

    def close(self) -> None:
        """Give back what was preallocated."""
        if self._descriptor >= 0:
            descriptor, end = self._descriptor, self._end
            self._descriptor, self._end = -1, 0
            try:
                os.ftruncate(descriptor, end)
            finally:
                os.close(descriptor)


class FrameLog:
    """The log in a folder, held by one process at a time. `replay` comes first; the rest belongs to one event loop."""

    def __init__(self, folder: Path, *, limit: int = FILE_BYTES, pending: int = PENDING_BYTES) -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
        self._folder = folder
        self._pending = pending
        self._holdings: dict[int, _Holding] = {}
        self._alive: set[int] = set()
        self._owners = 0
        self._tail = _Tail(folder, max(file_numbers(folder), default=-1) + 1, limit)
        self._thread = ThreadPoolExecutor(1, "log-writes")
        self._batch = _Batch()
        self._writing: _Batch | None = None
        self._owed: list[Frame] = []

    # ------------------------------------------------------------ reading

    def replay(self) -> Iterator[Frame | Damage]:
        """Everything of owners who were alive when they wrote it, in order; to be read to its end before any `add`."""
        for number in file_numbers(self._folder):
            try:
                data = file_path(self._folder, number).read_bytes()
            except OSError as error:
                raise StorageError(f"cannot read log file {number} of {self._folder}: {error}") from error
            held = self._holdings.setdefault(number, _Holding())
            for frame in read_frames(number, data):
                if frame is None:
                    what = f"file {number} cannot be read from some point on"
                    yield from [Damage(owner, what) for owner in sorted(self._alive)]
                    continue
                self._owners = max(self._owners, frame.owner + 1)
                self._hold(held, frame.owner, ended=isinstance(frame, Frame) and frame.kind == END)
                yield frame

    def _hold(self, held: _Holding, owner: int, *, ended: bool) -> None:
        held.owners.add(owner)
        if ended:
            held.ended.add(owner)
            self._alive.discard(owner)
        else:
            self._alive.add(owner)

    # ------------------------------------------------------------ writing

    def owner(self) -> int:
        """A number that nobody in this log has."""
        self._owners += 1
        return self._owners - 1

    def add(self, owner: int, kind: int, payload: bytes, *, lost: Callable[[], None] | None = None) -> None:
        """Queue a frame. `lost` is told, before anything else can be added, when it could not be kept."""
        queued = self._batch.size + (self._writing.size if self._writing else 0)
        if queued + len(payload) > self._pending:
            raise Unavailable(f"{queued >> 20} MiB wait for the disk of {self._folder}", "the disk is too slow")
        self._bring_along()
        self._queue(Frame(owner, kind, payload))
        if lost is not None:
            self._batch.losses.append(lost)

    def owe(self, owner: int, kind: int, payload: bytes) -> None:
        """Queue a small frame that is never refused and, where a write fails, comes with the next one."""
        self._owed.append(Frame(owner, kind, payload))
        self._bring_along()

    def end(self, owner: int) -> None:
        """The owner's last frame: from then on, nothing of it is wanted."""
        self.owe(owner, END, b"")

    def _bring_along(self) -> None:
        owed, self._owed = self._owed, []
        for frame in owed:
            self._queue(frame)
            self._batch.owed.append(frame)

    def _queue(self, frame: Frame) -> None:
        if not self._batch.frames and self._writing is None:
            # Not at once: what else ends in this turn of the loop shares the write.
            asyncio.get_running_loop().call_soon(self._write_next)
        self._batch.frames.append(frame)
        self._batch.size += len(frame.payload)

    def sync(self) -> asyncio.Future[None]:
        """Done once everything added so far is on disk, or with what the disk said instead."""
        self._bring_along()
        waiter = asyncio.get_running_loop().create_future()
        batch = self._batch if self._batch.frames else self._writing
        if batch is None:
            waiter.set_result(None)
        else:
            batch.waiters.append(waiter)
        return waiter

    def _write_next(self) -> None:
        if self._writing is not None or not self._batch.frames:
            return
        batch, self._batch = self._batch, _Batch()
        self._writing = batch
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._tail.write, batch.frames).add_done_callback(
            lambda written: self._written(batch, written)
        )

    def _written(self, batch: _Batch, written: asyncio.Future[int]) -> None:
        self._writing = None
        error = written.exception()
        if error is not None:
            # What was added meanwhile may build on what is lost.
            behind, self._batch = self._batch, _Batch()
            log.warning("%d frames could not be kept in %s: %s", len(batch.frames + behind.frames), self._folder, error)
            self._owed = self._still_owed(batch.owed + behind.owed)
            batch.fail(error)
            behind.fail(error)
            return
        held = self._holdings.setdefault(written.result(), _Holding())
        for frame in batch.frames:
            self._hold(held, frame.owner, ended=frame.kind == END)
        batch.kept()
        self._write_next()
        if any(frame.kind == END for frame in batch.frames):
            self._drop_files(written.result())

    def _still_owed(self, frames: list[Frame]) -> list[Frame]:
        """Of an owner who has ended only the end, and nothing where the disk has nothing of it: a disk that stays full
        must not fill the memory."""
        ended = {frame.owner for frame in frames if frame.kind == END}
        return [f for f in frames if f.owner not in ended or (f.kind == END and f.owner in self._alive)]

    # ------------------------------------------------------------ files that nobody wants

    def _drop_files(self, current: int) -> None:
        """An owner's end stays for as long as anything else of it, or it would be alive again after a restart."""
        gone = []
        for number in sorted(self._holdings):
            held = self._holdings[number]
            if number < current and not held.owners & self._alive and not self._ends_elsewhere(number, held):
                gone.append(number)
                del self._holdings[number]
        if gone:
            asyncio.get_running_loop().run_in_executor(self._thread, _remove, self._folder, gone)

    def _ends_elsewhere(self, number: int, held: _Holding) -> bool:
        """Whether some owner who ended in this file has frames in an earlier one."""
        return any(held.ended & other.owners for at, other in self._holdings.items() if at < number)

    async def close(self) -> None:
        """Everything added is on disk, or its owner was told; the folder is free for another process."""
        try:
            with suppress(RillflowError):
                while self._owed or self._batch.frames or self._writing is not None:
                    await self.sync()
        finally:
            await asyncio.to_thread(self._thread.shutdown)
            with suppress(OSError):
                self._tail.close()
            os.close(self._lock)


def _remove(folder: Path, numbers: list[int]) -> None:
    try:
        for number in numbers:
            file_path(folder, number).unlink(missing_ok=True)
    except OSError as error:
        log.warning("log files %s of %s could not be removed: %s", numbers, folder, error)


def _lock(folder: Path) -> int:
    """Held for as long as the process lives, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"another process writes the log in {folder}", "stop it first, or use another folder") from error
    return descriptor
