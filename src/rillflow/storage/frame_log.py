"""An append-only log of frames, each of which belongs to an owner, in the segment files of a folder.

After `sync`, all earlier frames are on disk. Frames that come while a write is under way share the next one, so that
many owners pay for one sync. A write that fails leaves nothing behind, and everything that was added behind it fails
with it: the log always holds all that was added up to some moment. The exception are frames that are *owed*: no
caller would add them again, so the next write includes them. A file is dropped once none of its owners is alive.

A frame is a record of one column (see `records`), whose name is its owner and kind. The column ends in a byte other
than zero. So reading distinguishes a torn tail (a process or a machine died while it wrote, before it acknowledged)
from damage. It names the owners who lost something: the frame's own, or all that are alive where the owner cannot be
read. It does not protect against a file that is lost or cut back as a whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from rillflow.batching import Batcher
from rillflow.errors import RillflowError, RunError, StorageError, Unavailable
from rillflow.storage.files import disk_errors
from rillflow.storage.records import Columns, Unreadable, scan
from rillflow.storage.segments import SEGMENT_BYTES, SegmentWriter, drop_segments, segment_numbers, segment_path

PENDING_BYTES = 256 << 20
END = 0  # the kind of an owner's last frame

_LAST = b"\xff"  # the last byte of a frame's column
_MOST = 1 << 20  # frames of one write

log = logging.getLogger(__name__)


class Frame(NamedTuple):
    owner: int
    kind: int
    payload: bytes


class Damage(NamedTuple):
    """A frame of `owner` cannot be read, or may be missing."""

    owner: int
    what: str


def columns_of(frame: Frame) -> dict[str, bytes]:
    """Return the columns of a frame's record."""
    return {f"{frame.owner}.{frame.kind}": frame.payload + _LAST}


def read_frames(segment: int, data: bytes) -> Iterator[Frame | Damage | Unreadable]:
    """Yield the frames of one file; Unreadable where the owner of what is damaged is not known."""
    for found in scan(data, segment):
        yield found if isinstance(found, Unreadable) else _frame(segment, data, found)


def _frame(segment: int, data: bytes, columns: Columns) -> Frame | Damage | Unreadable:
    ((name, (start, length, checksum)),) = columns.items()
    owner, _, kind = name.partition(".")
    if not owner.isdecimal() or not kind.isdecimal():
        return Unreadable(f"the record at byte {start} of segment {segment} is not a frame", rest=False)
    column = data[start : start + length]
    if xxh3_64_intdigest(column) != checksum:
        return Damage(int(owner), f"{length} bytes at {start} of segment {segment} do not match their checksum")
    return Frame(int(owner), int(kind), column[:-1])


class _Added(NamedTuple):
    """A frame on its way to the disk. `lost` is called when it could not be kept."""

    frame: Frame
    owed: bool
    lost: Callable[[], None] | None = None


@dataclass(slots=True)
class _Holding:
    """The owners whose frames a file has, and those who ended in it."""

    owners: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class FrameLog:
    """The log in a folder, held by one process at a time. `replay` comes first; the rest belongs to one event loop."""

    def __init__(self, folder: Path, *, limit: int = SEGMENT_BYTES, pending: int = PENDING_BYTES) -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
        self._folder = folder
        self._pending = pending
        self._holdings: dict[int, _Holding] = {}
        self._alive: set[int] = set()
        self._owners = 0
        self._writer = SegmentWriter(folder, limit, "machine", private=True)
        self._thread = ThreadPoolExecutor(1, "log-writes")
        self._batcher = Batcher[_Added, None](self._write, most=_MOST)
        self._newest: asyncio.Future[None] | None = None  # done once everything that was added is on disk
        self._owed: list[Frame] = []

    # ------------------------------------------------------------ reading

    def replay(self) -> Iterator[Frame | Damage]:
        """Yield what owners wrote while they were alive, in order; to be read to its end before any `add`."""
        for number in sorted(segment_numbers(self._folder)):
            try:
                data = segment_path(self._folder, number).read_bytes()
            except OSError as error:
                raise StorageError(f"cannot read segment {number} of {self._folder}: {error}") from error
            held = self._holdings.setdefault(number, _Holding())
            for frame in read_frames(number, data):
                if isinstance(frame, Unreadable):
                    yield from [Damage(owner, frame.what) for owner in sorted(self._alive)]
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
        """Return a number that no owner in this log has."""
        self._owners += 1
        return self._owners - 1

    def add(self, owner: int, kind: int, payload: bytes, *, lost: Callable[[], None] | None = None) -> None:
        """Queue a frame. `lost` is called, before anything else can be added, when it could not be kept."""
        queued = self._batcher.size
        if queued + len(payload) > self._pending:
            raise Unavailable(f"{queued >> 20} MiB wait for the disk of {self._folder}", "the disk is too slow")
        self._bring_along()
        self._queue(_Added(Frame(owner, kind, payload), owed=False, lost=lost))

    def owe(self, owner: int, kind: int, payload: bytes) -> None:
        """Queue a small frame that is never refused and, where a write fails, comes with the next one."""
        self._owed.append(Frame(owner, kind, payload))
        self._bring_along()

    def end(self, owner: int) -> None:
        """Queue the owner's last frame: from then on, nothing of it is wanted."""
        self.owe(owner, END, b"")

    def _bring_along(self) -> None:
        owed, self._owed = self._owed, []
        for frame in owed:
            self._queue(_Added(frame, owed=True))

    def _queue(self, added: _Added) -> None:
        self._newest = self._batcher.submit(added, len(added.frame.payload))
        self._newest.add_done_callback(_seen)

    def sync(self) -> asyncio.Future[None]:
        """Return a future that is done once everything added so far is on disk, or fails with what the disk said."""
        self._bring_along()
        if self._newest is None or self._newest.done():
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        waiting = asyncio.shield(self._newest)
        waiting.add_done_callback(_seen)
        return waiting

    async def _write(self, added: list[_Added]) -> list[None]:
        """Write one batch; of a failed one, and of what was added behind it and may build on it, nothing is kept."""
        frames = [one.frame for one in added]
        columns = [columns_of(frame) for frame in frames]
        loop = asyncio.get_running_loop()
        try:
            number = await loop.run_in_executor(self._thread, self._writer.write_together, columns)
        except Exception as caught:
            error = caught if isinstance(caught, RillflowError) else StorageError(f"cannot write frames: {caught!r}")
            lost = added + self._batcher.fail_waiting(error)
            log.warning("%d frames could not be kept in %s: %s", len(lost), self._folder, error)
            self._owed = self._still_owed([one.frame for one in lost if one.owed])
            for one in lost:
                if one.lost is not None:
                    one.lost()
            raise error from caught
        held = self._holdings.setdefault(number, _Holding())
        for frame in frames:
            self._hold(held, frame.owner, ended=frame.kind == END)
        if any(frame.kind == END for frame in frames):
            self._drop_files(number)
        return [None] * len(added)

    def _still_owed(self, frames: list[Frame]) -> list[Frame]:
        """Return what must be written again. Of an owner who has ended that is only the end, and nothing where the disk
        has nothing of it: a disk that stays full must not fill the memory."""
        ended = {frame.owner for frame in frames if frame.kind == END}
        return [f for f in frames if f.owner not in ended or (f.kind == END and f.owner in self._alive)]

    # ------------------------------------------------------------ files that nobody wants

    def _drop_files(self, current: int) -> None:
        """Drop files without a living owner. An owner's end stays for as long as anything else of it, or it would be
        alive again after a restart."""
        gone = []
        for number in sorted(self._holdings):
            held = self._holdings[number]
            if number < current and not held.owners & self._alive and not self._ends_elsewhere(number, held):
                gone.append(number)
                del self._holdings[number]
        if gone:
            asyncio.get_running_loop().run_in_executor(self._thread, _drop, self._folder, gone)

    def _ends_elsewhere(self, number: int, held: _Holding) -> bool:
        """Return whether some owner who ended in this file has frames in an earlier one."""
        return any(held.ended & other.owners for at, other in self._holdings.items() if at < number)

    async def close(self) -> None:
        """Write everything that was added, or tell that it is lost; leave the folder to another process."""
        try:
            with suppress(RillflowError):
                while self._owed or (self._newest is not None and not self._newest.done()):
                    await self.sync()
        finally:
            await self._batcher.close(finish=True)
            await asyncio.to_thread(self._thread.shutdown)
            self._writer.close()
            os.close(self._lock)


def _seen(done: asyncio.Future[None]) -> None:
    """Keep asyncio from logging an error that was not retrieved."""
    if not done.cancelled():
        done.exception()


def _drop(folder: Path, numbers: list[int]) -> None:
    try:
        drop_segments(folder, numbers)
    except (RillflowError, OSError) as error:
        log.warning("segments %s of %s could not be dropped: %s", numbers, folder, error)


def _lock(folder: Path) -> int:
    """Return a descriptor that holds the folder for as long as the process lives, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"another process writes the log in {folder}", "stop it first, or use another folder") from error
    return descriptor
