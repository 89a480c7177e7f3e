"""An engine host for other processes: tokens go out as they are sampled, and a reader that goes aborts its request.

What is wrong with a request is answered with its status as long as nothing was sent; after that it travels in the
stream. While nothing is sampled, also while the engines are held, a frame goes out every second: silence means death.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rillflow.engine.frames import KEEP_ALIVE, KEEP_ALIVE_SECONDS, Frame, Generate, Hold, Release, encode
from rillflow.engine.host import EngineHost
from rillflow.errors import BadRequest, RillflowError, to_body
from rillflow.types import Chunk, EngineInfo
from rillflow.wire import Service
from rillflow.wire.server import disconnected, read_body
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)

SEND_SECONDS = 30.0  # a reader that takes nothing for so long has gone
BODY_LIMIT = 64 << 20
_REASON = 200
_LONGEST_HOLD = 3600.0

Frames = AsyncGenerator[Chunk | None]


class EngineService(Service):
    """Serves `host` to the run's nodes."""

    def __init__(self, host: EngineHost, token: str | Keyring, *, idle: float = KEEP_ALIVE_SECONDS) -> None:
        super().__init__("engine", token, body_limit=BODY_LIMIT)
        self._host = host
        self._idle = idle
        self._decode = msgspec.msgpack.Decoder(Generate).decode
        self.route("/generate", self._generate, ["POST"], "node", body=Generate, waits=True)
        self.post("/pause", self._pause, Hold, "node")
        self.post("/resume", self._resume, Release, "node")
        self.get("/status", self._host.info, "reader")

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._host.url = await super().start(host, port)
        return self._host.url

    async def stop(self) -> None:
        """Answers under way are sent to other engines before the service ends."""
        await self._host.drain()
        await super().stop()

    async def _generate(self, request: Request) -> Response:
        raw = await read_body(request, BODY_LIMIT)
        try:
            asked = self._decode(raw)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"/generate: {error}", "the body must be a msgpack Generate") from error
        frames = self._host.frames(asked.policy, asked.request, asked.floor, self._idle)
        try:
            first = await anext(frames)
        except StopAsyncIteration:
            raise BadRequest("nothing was sampled") from None
        return FrameStream(first, frames)

    async def _pause(self, ask: Hold) -> EngineInfo:
        if not 0 < len(ask.reason) <= _REASON or not 0 < ask.seconds <= _LONGEST_HOLD:
            raise BadRequest(
                "a hold has a reason and an end", f"up to {_REASON} characters and {_LONGEST_HOLD:.0f} seconds"
            )
        return await self._host.hold(ask.reason, move=ask.move, seconds=ask.seconds)

    async def _resume(self, ask: Release) -> EngineInfo:
        return await self._host.release(ask.reason)


class FrameStream(Response):
    """The answer to one request. It ends with its last chunk, with an error, or when its reader goes."""

    def __init__(self, first: Chunk | None, frames: Frames) -> None:
        super().__init__(media_type="application/octet-stream")
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            # The reader sees that the answer broke off, and goes elsewhere; why it did is to be read here.
            if sending.done() and (error := sending.exception()) is not None:
                log.error("an answer broke off", exc_info=error)
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._frames):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _body(send, _encoded(self._first))
            try:
                async for frame in self._frames:
                    await _body(send, _encoded(frame))
            except RillflowError as error:
                await _body(send, encode(Frame(error=to_body(error))))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encoded(frame: Chunk | None) -> bytes:
    return KEEP_ALIVE if frame is None else encode(Frame(chunk=frame))


async def _body(send: Send, data: bytes) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})
