"""An engine host for other processes, and its client: the routes, the frames of an answer, the service, `RemoteEngine`.

An answer is a stream of frames, each a length and a msgpack body. An empty frame says only that the engine is alive;
one goes out every second in which nothing is sampled, also while the engines are held, so silence means that the engine
died. A request that is refused before anything was sent is answered with its status; a later error is a frame. A reader
that disconnects aborts its request.

An engine that cannot be reached, that disconnects or that is silent for `stall` seconds is EngineLost: the tokens that
came before are valid, the rest can be sampled elsewhere. An error of the request itself is raised as it is. Any other
answer, perhaps of another program that has the engine's port now, is EngineLost, too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing, suppress
from typing import TypeVar

import msgspec

from rillflow.engine.host import HOLD_SECONDS, EngineHost
from rillflow.errors import BadRequest, EngineError, EngineLost, ErrorBody, RillflowError, from_body, to_body
from rillflow.types import Chunk, EngineInfo, GenerateRequest, Wire
from rillflow.types.base import msgpack_decoder
from rillflow.types.routes import BYTES, MSGPACK, Route, get, post, raw
from rillflow.wire import Service
from rillflow.wire.connections import Arriving, Connections
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
Body = TypeVar("Body")

STALL_SECONDS = 10.0
CONNECT_SECONDS = 3.0
CONTROL_SECONDS = 2.0
NEWS_SECONDS = 2.0  # age that information of the roster may have: a beat, and a look at the roster
_CONNECTIONS = 8192  # bounded by the gateway's calls, which are bounded before they come here
_END_SECONDS = 1.0
_REFUSAL = 1 << 20  # most bytes of a refusal
_LOSSES = (OSError, msgspec.MsgspecError)  # errors of a connection, and of an answer that is not an engine's
_OF_REQUESTS = (BadRequest, EngineError)


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


_ALIVE = Frame()
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


# ------------------------------------------------------------ the client


class RemoteEngine:
    """One engine process, by name and address. `known` is the newest information about it."""

    def __init__(
        self, name: str, url: str, token: str, *, stall: float = STALL_SECONDS, connect: float = CONNECT_SECONDS
    ) -> None:
        self.name = name
        self.known = EngineInfo(name=name, url=url, versions={}, context=0, slots=1)
        self._url = url
        self._stall = stall
        self._connections = Connections(url, {"authorization": f"Bearer {token}"}, _CONNECTIONS, connect)
        self._closed = False
        self._told_at = -math.inf  # when the engine itself last answered
        self._noted_at: dict[str, float] = {}  # when a policy's tokens last showed newer weights
        self._encode = msgspec.msgpack.Encoder().encode

    def hear(self, info: EngineInfo) -> None:
        """Take information about the engine from the roster. It may be older than the engine's own answers and tokens:
        of two versions the newer one counts then. It may be newer where the engine has sampled nothing since."""
        known, since = self.known, asyncio.get_running_loop().time() - NEWS_SECONDS
        newer = {
            policy: max(version, info.versions.get(policy, version))
            for policy, version in known.versions.items()
            if max(self._told_at, self._noted_at.get(policy, -math.inf)) > since
        }
        paused = known.paused if self._told_at > since else info.paused
        self.known = msgspec.structs.replace(info, versions=info.versions | newer, paused=paused)

    async def info(self) -> EngineInfo:
        """Ask the engine. Raise EngineLost when it does not answer."""
        return await self._told(EngineRoutes.status, None)

    async def hold(self, reason: str, *, move: bool = False, seconds: float = HOLD_SECONDS) -> EngineInfo:
        return await self._told(EngineRoutes.pause, Hold(reason=reason, move=move, seconds=seconds))

    async def release(self, reason: str) -> EngineInfo:
        return await self._told(EngineRoutes.resume, Release(reason=reason))

    async def _told(self, route: Route[Body, EngineInfo], body: Body) -> EngineInfo:
        """Make one attempt; the caller repeats it."""
        data = self._encode(body) if route.has_body else b""
        self._check_open()
        try:
            status, answer = await self._connections.call(route.method, route.path, data, CONTROL_SECONDS)
            if status != 200:
                raise _refusal(self.name, status, answer)
            self.known = msgpack_decoder(route.reply).decode(answer)
        except _LOSSES as error:
            raise self._lost(error, CONTROL_SECONDS) from error
        self._told_at = asyncio.get_running_loop().time()
        return self.known

    async def close(self) -> None:
        """Close the connections: running and later requests are EngineLost."""
        self._closed = True
        self._connections.close()

    # ------------------------------------------------------------ sampling

    async def generate(self, policy: str, request: GenerateRequest, floor: int = -1) -> AsyncGenerator[Chunk]:
        self._check_open()
        body = self._encode(Generate(policy=policy, request=request, floor=floor))
        route = EngineRoutes.generate
        try:
            answer = await self._connections.begin(route.method, route.path, body, self._stall)
            with closing(answer):
                if answer.status != 200:
                    raise _refusal(self.name, answer.status, await self._body(answer))
                received = bytearray()
                while True:
                    chunk = self._chunk(received)
                    if chunk is None:
                        data = await answer.read(self._stall)
                        if not data:
                            raise EngineLost(f"engine {self.name} hung up in the middle of an answer")
                        received += data
                        continue
                    self._note(policy, chunk.version)
                    if chunk.finish is not None:
                        if not answer.ended:
                            await _to_the_end(answer)
                        yield chunk
                        return
                    yield chunk
        except _LOSSES as error:
            raise self._lost(error, self._stall) from error

    def _chunk(self, received: bytearray) -> Chunk | None:
        """Take the first whole chunk from what was received, if any. Raise the error that a frame carries."""
        while len(received) >= LENGTH:
            size = int.from_bytes(received[:LENGTH], "little")
            if size > LONGEST:
                raise EngineLost(f"engine {self.name} sent a frame of {size} bytes")
            if len(received) < LENGTH + size:
                break
            data = bytes(received[LENGTH : LENGTH + size])
            del received[: LENGTH + size]
            frame = decode(data) if data else _ALIVE
            if frame.error is not None:
                raise _said(self.name, from_body(frame.error))
            if frame.chunk is not None:
                return frame.chunk
        return None

    async def _body(self, answer: Arriving) -> bytes:
        """Return the body of a refusal."""
        body = b""
        while len(body) < _REFUSAL and (part := await answer.read(self._stall)):
            body += part
        return body

    def _note(self, policy: str, version: int) -> None:
        # Streams are read at different speeds: an older version than the known one is ignored.
        if self.known.versions.get(policy, -1) < version:
            self.known = msgspec.structs.replace(self.known, versions=self.known.versions | {policy: version})
            self._noted_at[policy] = asyncio.get_running_loop().time()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineLost(f"engine {self.name} has gone from {self._url}")

    def _lost(self, error: Exception, silence: float) -> EngineLost:
        """Return the EngineLost for an error of the connection."""
        if isinstance(error, TimeoutError):
            return EngineLost(f"engine {self.name} was silent for {silence:.0f} s")
        if isinstance(error, OSError):
            return EngineLost(f"engine {self.name} cannot be reached: {type(error).__name__}: {error}")
        return EngineLost(f"engine {self.name} answered with something else: {error}")


async def _to_the_end(answer: Arriving) -> None:
    """Wait for the end of a complete answer, so that its connection can be used again."""
    with suppress(OSError):
        while not answer.ended:
            await answer.read(_END_SECONDS)


def _refusal(name: str, status: int, body: bytes) -> RillflowError:
    try:
        return _said(name, from_body(msgpack_decoder(ErrorBody).decode(body)))
    except msgspec.MsgspecError:
        return EngineLost(f"engine {name} answered with status {status}")


def _said(name: str, error: RillflowError) -> RillflowError:
    if isinstance(error, _OF_REQUESTS) and not isinstance(error, EngineLost):
        return error
    return EngineLost(f"engine {name}: {error.message}", error.hint)
