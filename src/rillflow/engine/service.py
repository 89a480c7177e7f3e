"""An engine host for other processes: its routes, the frames of an answer, and the service.

An answer is a stream of frames, each a length and a msgpack body. An empty frame says only that the engine is alive;
one goes out every second in which nothing is sampled, also while the engines are held, so silence means that the engine
died. A request that is refused before anything was sent is answered with its status; a later error is a frame. A reader
that disconnects aborts its request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from rillflow.engine.host import EngineHost
from rillflow.errors import BadRequest, ErrorBody, RillflowError, to_body
from rillflow.types import Chunk, EngineInfo, GenerateRequest, Wire
from rillflow.types.base import msgpack_decoder
from rillflow.types.routes import BYTES, MSGPACK, get, post, raw
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response, Send, Stream
from rillflow.wire.tokens import Keyring

KEEP_ALIVE_SECONDS = 1.0
LENGTH = 4  # bytes of a frame's length, little-endian
LONGEST = 64 << 20
KEEP_ALIVE = bytes(LENGTH)
BODY_LIMIT = 64 << 20
_REASON = 200
_LONGEST_HOLD = 3600.0

Frames = AsyncGenerator[Chunk | None]


# ------------------------------------------------------------ messages


class Generate(Wire, frozen=True):
    """A request for one policy. It waits some seconds for the version `floor` before it samples an older one."""

    policy: str
    request: GenerateRequest
    floor: int = -1


class Hold(Wire, frozen=True):
    """Stop sampling for `reason`, for `seconds` at most. With `move`, running answers are to go on at other engines."""

    reason: str
    move: bool = False
    seconds: float = 10.0


class Release(Wire, frozen=True):
    reason: str


class Frame(Wire, frozen=True):
    """A chunk or an error, never both."""

    chunk: Chunk | None = None
    error: ErrorBody | None = None


_encoder = msgspec.msgpack.Encoder()
decode = msgspec.msgpack.Decoder(Frame).decode


def encode(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return len(body).to_bytes(LENGTH, "little") + body


class EngineRoutes:
    """The routes of an engine process. The gateways of a run call them (`engine.remote`)."""

    generate = raw(
        "POST", "/generate", "node", summary="Sample an answer, as a stream of frames", body=Generate, content=MSGPACK,
        again="an answer that nobody reads is aborted", waits=True, answers={BYTES: (Frame,)},
    )  # fmt: skip
    pause = post(
        "/pause",
        Hold,
        EngineInfo,
        "node",
        summary="Hold the engine for a reason",
        again="a hold is known by its reason",
    )
    resume = post(
        "/resume", Release, EngineInfo, "node", summary="Take back a reason to hold the engine",
        again="a hold is known by its reason",
    )  # fmt: skip
    status = get("/status", EngineInfo, "reader", summary="What the engine serves, and how loaded it is")


# ------------------------------------------------------------ the service


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
        """Send running answers to other engines, then stop."""
        await self._host.drain()
        await super().stop()

    async def _generate(self, request: Request) -> Response:
        body = await request.read(BODY_LIMIT)
        try:
            asked = msgpack_decoder(Generate).decode(body)
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
    """The answer to one request. It ends with its last chunk, with an error, or when its reader disconnects."""

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
