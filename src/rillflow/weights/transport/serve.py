"""Serves the weights of a run over HTTP: the line with a wait for news of it, manifests, files by ranges
(`transport.routes`).

Invariants: what is served are the bytes that were published, so that readers can check them; a reader that takes
nothing for a while is cut off; how many are served at once is bounded. The reader's token opens these routes: a relay
that has it can read weights, and neither sign them nor change anything else of the run.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from prometheus_client import Counter

from rillflow.errors import BadRequest, WireError
from rillflow.types.route import BYTES, JSON
from rillflow.weights.transport.routes import WeightRoutes
from rillflow.weights.transport.shelf import NOTHING, FolderShelf, OpenFile, Shelf, absent
from rillflow.wire import Service
from rillflow.wire.gate import Gate
from rillflow.wire.messages import Request, Response, Send, Stream
from rillflow.wire.tokens import Keyring

LONGEST_WAIT = 60.0
TRANSFERS = 256
WAITS = 4096
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
# Private: the token is asked of every reader, also by caches on the way.
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
        raise BadRequest(f"wait={asked[:20]} is no wait", f"give 0 to {LONGEST_WAIT:.0f} seconds")
    return wait


def _part(asked: str, size: int) -> range | None:
    """The bytes that a `Range` names; None for all of them: also when it is of a kind that is not served."""
    found = _RANGE.fullmatch(asked)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        part = range(max(0, size - int(found[2])), size)
    else:
        part = range(int(found[1]), min(size, int(found[2]) + 1 if found[2] else size))
    if not part:
        raise NoSuchRange(f"there is no {asked} in {size} bytes", "ask for bytes that the file has")
    return part


class FilePart(Stream):
    """A file or a part of it, read as it is sent. It ends when its reader goes or takes nothing."""

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
