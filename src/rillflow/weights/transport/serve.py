"""Serves the weights of a run over HTTP: the line with a wait for news of it, manifests, files by ranges.

    GET /weights/{policy}/line?known=TAG&wait=SECONDS     304 when it is still the one with this tag
    GET /weights/{policy}/{version}/manifest.json
    GET /weights/{policy}/{version}/{file}                whole, or a `Range`; HEAD for its size

Invariants: what is served are the bytes that were published, so that readers can check them; a reader that takes
nothing for a while is cut off; how many are served at once is bounded. The reader's token opens these routes: a relay
that has it can read weights, and neither sign them nor change anything else of the run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rillflow.errors import BadRequest, WireError
from rillflow.weights.sealed import MANIFEST
from rillflow.weights.transport.shelf import NOTHING, FolderShelf, OpenFile, Shelf, absent
from rillflow.wire import Service
from rillflow.wire.gate import Gate
from rillflow.wire.server import disconnected, while_connected
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
TRANSFERS = 256
WAITS = 4096
SEND_SECONDS = 30.0  # a reader that takes nothing for so long has gone
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
        self.route("/weights/{policy}/line", self._line, ["GET"], "reader", gate=lines, waits=True)
        self.route(f"/weights/{{policy}}/{{version:int}}/{MANIFEST}", self._manifest, ["GET"], "reader", gate=files)
        self.route("/weights/{policy}/{version:int}/{file}", self._file, ["GET"], "reader", gate=files)

    async def stop(self) -> None:
        await super().stop()
        await self._shelf.close()

    async def _line(self, request: Request) -> Response:
        known = request.query_params.get("known", "")
        policy, wait = request.path_params["policy"], _seconds(request)
        told = await while_connected(request.scope, lambda: self._shelf.line(policy, known, wait))
        headers = {"etag": f'"{told.tag}"', "cache-control": _ASK_AGAIN, **told.notes}
        if told.tag == known:
            return Response(status_code=304, headers=headers)
        if told.tag == NOTHING:
            raise absent("line: nothing was published yet")
        return Response(told.data, headers=headers, media_type="application/json")

    async def _manifest(self, request: Request) -> Response:
        policy, version = request.path_params["policy"], int(request.path_params["version"])
        data = await self._shelf.manifest(policy, version)
        return Response(data, headers={"cache-control": _ASK_AGAIN}, media_type="application/json")

    async def _file(self, request: Request) -> Response:
        at = request.path_params
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
    asked = request.query_params.get("wait", "0")
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


class FilePart(Response):
    """A file or a part of it, read as it is sent. It ends when its reader goes or takes nothing."""

    def __init__(self, file: OpenFile, part: range | None, count: Callable[[int], None], *, body: bool) -> None:
        super().__init__(status_code=200 if part is None else 206, media_type="application/octet-stream")
        self._file = file
        self._part = range(file.size) if part is None else part
        self._count = count
        self._body = body
        self.headers.update(
            {"etag": f'"{file.tag}"', "cache-control": _FOR_EVER, "accept-ranges": "bytes"}
            | {"content-length": str(len(self._part))}
        )
        if part is not None:
            self.headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{file.size}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and (error := sending.exception()) is not None:
                # The reader must see that this is not the end of the file, at once.
                log.warning("a transfer broke off: %s", str(error) or "the reader takes nothing")
                scope["extensions"]["rillflow"]["hang_up"]()
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            self._file.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._body:
            async with aclosing(self._file.blocks(self._part.start, self._part.stop)) as blocks:
                async for block in blocks:
                    async with asyncio.timeout(SEND_SECONDS):
                        await send({"type": "http.response.body", "body": block, "more_body": True})
                    self._count(len(block))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
