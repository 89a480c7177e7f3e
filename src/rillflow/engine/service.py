"""An engine host for other processes: tokens go out as they are sampled, and a reader that goes aborts its request.

What is wrong with a request is answered with its status as long as nothing was sent; after that it travels in the
stream. While nothing is sampled, also while the engines are held, a frame goes out every second: silence means death.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from rillflow.engine.frames import KEEP_ALIVE, KEEP_ALIVE_SECONDS, Frame, Generate, Hold, Release, encode
from rillflow.engine.host import EngineHost
from rillflow.engine.routes import EngineRoutes
from rillflow.errors import BadRequest, RillflowError, to_body
from rillflow.types import Chunk, EngineInfo
from rillflow.types.decoding import msgpack_decoder
from rillflow.types.route import BYTES
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response, Send, Stream
from rillflow.wire.tokens import Keyring

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
        self.raw(EngineRoutes.generate, self._generate)
        self.on(EngineRoutes.pause, self._pause)
        self.on(EngineRoutes.resume, self._resume)
        self.on(EngineRoutes.status, self._host.info)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._host.url = await super().start(host, port)
        return self._host.url

    async def stop(self) -> None:
        """Answers under way are sent to other engines before the service ends."""
        await self._host.drain()
        await super().stop()

    async def _generate(self, request: Request) -> Response:
        raw = await request.read(BODY_LIMIT)
        try:
            asked = msgpack_decoder(Generate).decode(raw)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"/generate: {error}", "the body must be a msgpack Generate") from error
        frames = self._host.frames(asked.policy, asked.request, asked.floor, self._idle)
        try:
            first = await request.while_connected(lambda: anext(frames))
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


class FrameStream(Stream):
    """The answer to one request. It ends with its last chunk, with an error, or when its reader goes."""

    def __init__(self, first: Chunk | None, frames: Frames) -> None:
        super().__init__(media_type=BYTES)
        self._first = first
        self._frames = frames

    async def write(self, send: Send) -> None:
        async with aclosing(self._frames):
            await send(_encoded(self._first))
            try:
                async for frame in self._frames:
                    await send(_encoded(frame))
            except RillflowError as error:
                await send(encode(Frame(error=to_body(error))))


def _encoded(frame: Chunk | None) -> bytes:
    return KEEP_ALIVE if frame is None else encode(Frame(chunk=frame))
