"""Serves the weights of a run over HTTP: the line, with a wait for its next change; manifests; files by ranges.

    ROOT/POLICY/head.json, v00000012/manifest.json, v00000012/model.safetensors

A shelf holds the files to serve: the stores in a folder here, a cache in a relay.

Invariants: served bytes are the published ones, so readers can verify them; nothing outside the root is read: each part
of a name is checked, and no symbolic link is followed; an open file can be read to its end even if its version is
removed; a reader that stops reading is disconnected; the number of concurrent transfers is bounded. The reader token
opens these routes: a relay that has it can read weights, but neither sign them nor change anything else of the run.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import re
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from prometheus_client import Counter

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, CorruptData, StorageError, WireError
from rillflow.types.routes import BYTES, JSON, raw
from rillflow.weights.manifest import HEAD, folder_name
from rillflow.weights.sealed import MANIFEST
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response, Send, Stream
from rillflow.wire.routing import Gate, NotFound
from rillflow.wire.tokens import Keyring


class WeightRoutes:
    """Routes for readers. They serve published files and change nothing."""

    line = raw(
        "GET", "/weights/{policy}/line", "reader", summary="A policy's line of versions; 304 while it is the known one",
        waits=True, answers={JSON: ()}, query=("known", "wait"),
    )  # fmt: skip
    manifest = raw(
        "GET", f"/weights/{{policy}}/{{version:int}}/{MANIFEST}", "reader", summary="The manifest of a version",
        answers={JSON: ()},
    )  # fmt: skip
    file = raw(
        "GET", "/weights/{policy}/{version:int}/{file}", "reader", summary="A file of a version, whole or a range",
        answers={BYTES: ()}, headers=("range", "if-range"),
    )  # fmt: skip


# ---------------------------------------------------------------- shelves


T = TypeVar("T")

BLOCK = 1 << 20
NOTHING = "none"  # the tag of the line of a policy that has published nothing
_LOOK = 0.1  # seconds between two reads of a line that a request waits for
_READERS = 4
_SMALL = 64 << 20  # most bytes of a line or a manifest
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe does not wait either
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Told(NamedTuple):
    """A line as it was written, with its tag; `notes` are headers of the answer."""

    data: bytes
    tag: str
    notes: Mapping[str, str] = {}


class OpenFile(Protocol):
    """A file that is being served. `close` is called exactly once."""

    size: int
    tag: str

    def blocks(self, start: int, end: int) -> AsyncGenerator[bytes]: ...

    def close(self) -> None: ...


class Shelf(Protocol):
    """The files that a weight service serves. NotFound for missing ones; names come from outside."""

    async def line(self, policy: str, known: str, wait: float) -> Told:
        """Return the line as soon as its tag differs from `known`, or after `wait` seconds."""

    async def manifest(self, policy: str, version: int) -> bytes: ...

    async def open(self, policy: str, version: int, name: str) -> OpenFile: ...

    async def close(self) -> None: ...


def tag_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def checked(name: str) -> str:
    """Return a valid name of a policy or a file; NotFound for any other."""
    if not _NAME.fullmatch(name):
        raise absent(repr(name[:80]))
    return name


def absent(what: str) -> NotFound:
    return NotFound(f"{what} does not exist", "it was never published, or was removed: look at the line again")


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
        """Read the line once for all concurrent requests."""
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
        """Return a descriptor of a regular file below the root; the last part is its name."""
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
            raise StorageError(f"cannot read {'/'.join(parts)}: {error}", "check the disk of the store") from error
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
        raise CorruptData(f"{what} has {size} bytes", "it is damaged; its trainer writes it again when it starts")
    return os.pread(at, size, 0)


class DiskFile:
    """An OpenFile on a descriptor, which it closes. It stays readable when its folder is removed."""

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


# ---------------------------------------------------------------- the service


LONGEST_WAIT = 60.0
TRANSFERS = 256
WAITS = 4096
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
# Private: every reader must show its token, also to caches on the way.
_FOR_EVER = "private, max-age=31536000, immutable"
_ASK_AGAIN = "private, no-cache"


class NoSuchRange(WireError):
    status = 416


class WeightService(Service):
    """Serves a shelf to readers. The shelf is closed with it."""

    def __init__(self, shelf: Shelf, token: str | Keyring, *, name: str = "weights") -> None:
        super().__init__(name, token)
        self._shelf = shelf
        self._sent = Counter("rillflow_weights_sent_bytes", "Bytes of files sent", ["policy"], registry=self.registry)
        files, lines = Gate(TRANSFERS, "transfers"), Gate(WAITS, "waits for the line")
        self.raw(WeightRoutes.line, self._line, gate=lines)
        self.raw(WeightRoutes.manifest, self._manifest, gate=files)
        self.raw(WeightRoutes.file, self._file, gate=files)

    async def stop(self) -> None:
        await super().stop()
        await self._shelf.close()

    async def _line(self, request: Request) -> Response:
        known = request.query_value("known")
        policy, wait = request.params["policy"], _seconds(request)
        told = await request.while_connected(lambda: self._shelf.line(policy, known, wait))
        headers = {"etag": f'"{told.tag}"', "cache-control": _ASK_AGAIN, **told.notes}
        if told.tag == known:
            return Response(status=304, headers=headers)
        if told.tag == NOTHING:
            raise absent("line: nothing was published yet")
        return Response(told.data, headers=headers, media_type=JSON)

    async def _manifest(self, request: Request) -> Response:
        policy, version = request.params["policy"], int(request.params["version"])
        data = await self._shelf.manifest(policy, version)
        return Response(data, headers={"cache-control": _ASK_AGAIN}, media_type=JSON)

    async def _file(self, request: Request) -> Response:
        at = request.params
        file = await self._shelf.open(at["policy"], int(at["version"]), at["file"])
        try:
            asked = request.headers.get("range", "")
            if request.headers.get("if-range", f'"{file.tag}"') != f'"{file.tag}"':
                asked = ""
            part = _part(asked, file.size)
        except BaseException:
            file.close()
            raise
        return FilePart(file, part, self._sent.labels(at["policy"]).inc, body=request.method != "HEAD")


def _seconds(request: Request) -> float:
    asked = request.query_value("wait", "0")
    try:
        wait = float(asked)
    except ValueError:
        wait = math.nan
    if not 0 <= wait <= LONGEST_WAIT:
        raise BadRequest(f"wait={asked[:20]} is not valid", f"give 0 to {LONGEST_WAIT:.0f} seconds")
    return wait


def _part(asked: str, size: int) -> range | None:
    """Return the bytes of a `Range` header; None for all of them, also for kinds of ranges that are not supported."""
    found = _RANGE.fullmatch(asked)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        part = range(max(0, size - int(found[2])), size)
    else:
        part = range(int(found[1]), min(size, int(found[2]) + 1 if found[2] else size))
    if not part:
        raise NoSuchRange(f"{asked} is outside of {size} bytes", "ask for bytes that the file has")
    return part


class FilePart(Stream):
    """A file or a part of it, read while it is sent. It ends if its reader disconnects or stops reading."""

    def __init__(self, file: OpenFile, part: range | None, count: Callable[[int], None], *, body: bool) -> None:
        super().__init__(status=200 if part is None else 206, media_type=BYTES)
        self._file = file
        self._part = range(file.size) if part is None else part
        self._count = count
        self._body = body
        self.headers |= {"etag": f'"{file.tag}"', "cache-control": _FOR_EVER, "accept-ranges": "bytes"}
        self.headers["content-length"] = str(len(self._part))
        if part is not None:
            self.headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{file.size}"

    async def write(self, send: Send) -> None:
        try:
            if self._body:
                async with aclosing(self._file.blocks(self._part.start, self._part.stop)) as blocks:
                    async for block in blocks:
                        await send(block)
                        self._count(len(block))
        finally:
            self._file.close()


async def serve_weights(
    root: Path, token: str, *, on_ready: Callable[[str], None], host: str = "127.0.0.1", port: int = 0
) -> None:
    """Serve the stores in `root` until cancelled. `token` is the run's own."""
    service = WeightService(FolderShelf(root), token)
    on_ready(await service.start(host, port))
    try:
        await asyncio.Event().wait()
    finally:
        await service.stop()
