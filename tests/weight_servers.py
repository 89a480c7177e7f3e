"""Stores with small files to be served, and a server between reader and server that behaves badly."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rillflow.storage import write_atomic
from rillflow.weights import sealed
from rillflow.weights.manifest import Line, VersionManifest, key_of, signed
from rillflow.weights.sealed import FileFacts
from rillflow.weights.transport.cache import PartFile
from rillflow.weights.transport.serve import FolderShelf, WeightService
from rillflow.wire.tokens import reader_token, scoped_token

RUN_TOKEN = "the run's token"
TOKEN = scoped_token(RUN_TOKEN, "node")  # the source that a node pulls from
READING = reader_token(TOKEN)  # the bytes that it sends
KEY = key_of(TOKEN)
POLICY = "solver"

Files = Mapping[str, bytes]


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def publish(root: Path, version: int, files: Files, policy: str = POLICY) -> None:
    """A version of plain bytes, with manifest and line signed as a store's are."""
    folder = root / policy / f"v{version:08d}"
    folder.parent.mkdir(parents=True, exist_ok=True)

    def describe(written: dict[str, FileFacts]) -> VersionManifest:
        made = VersionManifest(files=written, version=version, parent=None, created=0.0, tensors={}, aliases={})
        return signed(made, KEY)

    sealed.seal(folder, files.items(), describe)
    write_line(root, version, policy)


def write_line(root: Path, head: int, policy: str = POLICY) -> None:
    folders = [path for path in (root / policy).iterdir() if re.fullmatch(r"v\d{8}", path.name)]
    manifests = [sealed.read_manifest(folder, VersionManifest) for folder in folders]
    line = Line(head, frozenset(), {manifest.version: manifest.entry for manifest in manifests})
    write_atomic(root / policy / "head.json", msgspec.json.encode(signed(line, KEY)))


@asynccontextmanager
async def served(root: Path) -> AsyncIterator[str]:
    service = WeightService(FolderShelf(root), RUN_TOKEN)
    url = await service.start()
    try:
        yield url
    finally:
        await service.stop()


class Exchange:
    """One request that passes: its head, and what the real server answers to it."""

    def __init__(self, number: int, head: bytes, upstream: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.path = head.split(b" ", 2)[1].decode()
        found = re.search(rb"range: bytes=(\d+)-(\d+)", head, re.IGNORECASE)
        self.range = (int(found[1]), int(found[2]) + 1) if found else None
        self._head = head
        self._upstream = upstream
        self._writer = writer

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body from the real server."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            writer.write(self._head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return head + b"\r\n\r\n", body

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def say(self, status: int, body: bytes = b"") -> None:
        await self.send(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    async def pass_on(self) -> None:
        await self.send(b"".join(await self.answer()))


Behaviour = Callable[[Exchange], Awaitable[None]]


class Between:
    """Counts the requests for files; `behave` answers each."""

    def __init__(self, upstream: str, behave: Behaviour) -> None:
        self._upstream = int(upstream.rsplit(":", 1)[1])
        self.behave = behave
        self.files: list[Exchange] = []
        self.asked = asyncio.Event()  # a file was asked for
        self.cuts = 0  # how many of the next requests for lines and manifests are cut off
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                head = await reader.readuntil(b"\r\n\r\n")
                exchange = Exchange(len(self.files), head, self._upstream, writer)
                if exchange.range is None:
                    self.cuts -= 1
                    if self.cuts < 0:
                        await exchange.pass_on()
                else:
                    self.files.append(exchange)
                    self.asked.set()
                    await self.behave(exchange)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def between(upstream: str, behave: Behaviour) -> AsyncIterator[tuple[str, Between]]:
    made = Between(upstream, behave)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", made
    finally:
        server.close()
        await made.close()


async def well(exchange: Exchange) -> None:
    await exchange.pass_on()


def part_record(cache: Path, version: int, name: str) -> list[list[int]]:
    """Return the ranges that the record of a download lists."""
    record = cache / f"v{version:08d}" / f".{name}.part.json"
    return json.loads(record.read_bytes())["have"] if record.is_file() else []


async def leaves_no_write_behind(reading: Coroutine[Any, Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while a thread writes, `reading` closes its file only after that: the descriptor could be another
    file's by then."""
    order: list[str] = []
    began, released = threading.Event(), threading.Event()
    write, close = PartFile.write, PartFile.close

    def slow(part: PartFile, start: int, data: bytes) -> None:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            released.wait(30)
        order.append("write")
        write(part, start, data)

    monkeypatch.setattr(PartFile, "write", slow)
    monkeypatch.setattr(PartFile, "close", lambda part: (order.append("close"), close(part)))
    task = asyncio.ensure_future(reading)
    assert await asyncio.to_thread(began.wait, 30)
    task.cancel()
    await asyncio.sleep(0.1)
    released.set()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(60):
        while not {"write", "close"} <= set(order):  # noqa: ASYNC110 - a thread sends no event
            await asyncio.sleep(0.01)
    assert order[-1] == "close", order
