"""What a weight service serves, and the shelf that is a store's folder.

    ROOT/POLICY/head.json, v00000012/manifest.json, v00000012/model.safetensors

Invariants: nothing outside the root is read, whatever the names are: each part is checked, and no symbolic link is
followed on the way. A file that is being read can be read to its end, also when its version is removed meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import CorruptData, StorageError
from rillflow.weights.manifest import HEAD, folder_name
from rillflow.weights.sealed import MANIFEST
from rillflow.wire.routing import NotFound

T = TypeVar("T")

BLOCK = 1 << 20
NOTHING = "none"  # the tag of the line of a policy that has published nothing
_LOOK = 0.1  # seconds between two looks at a line that somebody waits for
_READERS = 4
_SMALL = 64 << 20  # bytes; longer, a line or a manifest is not one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe does not wait either
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Told(NamedTuple):
    """A line as it was written, with what names it; `notes` are headers for who asks."""

    data: bytes
    tag: str
    notes: Mapping[str, str] = {}


class OpenFile(Protocol):
    """A file that is being served. `close` is called once, whatever happened."""

    size: int
    tag: str

    def blocks(self, start: int, end: int) -> AsyncGenerator[bytes]: ...

    def close(self) -> None: ...


class Shelf(Protocol):
    """NotFound for what is not there; the names come from outside."""

    async def line(self, policy: str, known: str, wait: float) -> Told:
        """As soon as its tag is another one than `known`, or after `wait` seconds."""

    async def manifest(self, policy: str, version: int) -> bytes: ...

    async def open(self, policy: str, version: int, name: str) -> OpenFile: ...

    async def close(self) -> None: ...


def tag_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def checked(name: str) -> str:
    """A name that can be that of a policy or a file, and of nothing else."""
    if not _NAME.fullmatch(name):
        raise absent(repr(name[:80]))
    return name


def absent(what: str) -> NotFound:
    return NotFound(f"there is no {what}", "it was never published, or was removed: look at the line again")


class FolderShelf:
    """Serves the stores in `root`, one folder for each policy."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self._root = root
        self._clock = clock or SystemClock()
        self._readers = ThreadPoolExecutor(_READERS, "weight-reads")
        self._seen: dict[str, tuple[tuple[int, int, int], Told]] = {}
        self._looks: dict[str, asyncio.Task[Told]] = {}

    async def line(self, policy: str, known: str, wait: float) -> Told:
        end = self._clock.monotonic() + wait
        while True:
            told = await self._look(checked(policy))
            left = end - self._clock.monotonic()
            if told.tag != known or left <= 0:
                return told
            await asyncio.sleep(min(left, _LOOK))

    async def _look(self, policy: str) -> Told:
        """One look at the disk for all who ask at the same time."""
        if policy not in self._looks:
            task = self._looks[policy] = asyncio.create_task(self._in_thread(lambda: self._read_line(policy)))
            task.add_done_callback(lambda _: self._looks.pop(policy))
        return await asyncio.shield(self._looks[policy])

    def _read_line(self, policy: str) -> Told:
        try:
            at = self._find(policy, HEAD)
        except NotFound:
            return Told(b"", NOTHING)
        try:
            status = os.fstat(at)
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if policy not in self._seen or self._seen[policy][0] != seen:
                data = _whole(at, f"{policy}/{HEAD}")
                self._seen[policy] = (seen, Told(data, tag_of(data)))
            return self._seen[policy][1]
        finally:
            os.close(at)

    async def manifest(self, policy: str, version: int) -> bytes:
        def read() -> bytes:
            at = self._find(checked(policy), folder_name(version), MANIFEST)
            try:
                return _whole(at, f"{policy} {version}")
            finally:
                os.close(at)

        return await self._in_thread(read)

    async def open(self, policy: str, version: int, name: str) -> OpenFile:
        parts = (checked(policy), folder_name(version), checked(name))
        return DiskFile(await self._in_thread(lambda: self._find(*parts)), self._in_thread)

    def _find(self, *parts: str) -> int:
        """A descriptor of a regular file below the root; the last part is its name."""
        *folders, name = parts
        held: list[int] = []
        try:
            held.append(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for folder in folders:
                held.append(os.open(folder, _FOLDER, dir_fd=held[-1]))
            at = os.open(name, _FILE, dir_fd=held[-1])
        except OSError as error:
            if error.errno in _ABSENT:
                raise absent("/".join(parts)) from error
            raise StorageError(f"cannot read {'/'.join(parts)}: {error}", "look at the disk of the store") from error
        finally:
            for folder_at in held:
                os.close(folder_at)
        if not stat.S_ISREG(os.fstat(at).st_mode):
            os.close(at)
            raise absent("/".join(parts))
        return at

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)


def _whole(at: int, what: str) -> bytes:
    size = os.fstat(at).st_size
    if size > _SMALL:
        raise CorruptData(f"{what} has {size} bytes", "it is damaged: its trainer writes it anew when it starts")
    return os.pread(at, size, 0)


class DiskFile:
    """An OpenFile by its descriptor, which it closes: it stays whole when its folder is taken away."""

    def __init__(self, at: int, in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]]) -> None:
        self._at = at
        self._in_thread = in_thread
        status = os.fstat(at)
        self.size = status.st_size
        self.tag = f"{status.st_size:x}-{status.st_mtime_ns:x}"

    async def blocks(self, start: int, end: int) -> AsyncGenerator[bytes]:
        while start < end:
            data = await self._in_thread(partial(os.pread, self._at, min(BLOCK, end - start), start))
            if not data:
                raise CorruptData("a file became shorter while it was read", "sealed files must not be changed")
            start += len(data)
            yield data

    def close(self) -> None:
        os.close(self._at)
