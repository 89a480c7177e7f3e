"""The stacks that `bench.wire` compares: for each, a server for another process and a client for this one.

All do the same work for a call: check the token, decode a msgpack body, count the request, encode the answer. Only
the transport differs.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import aiohttp
import msgspec
import uvicorn
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from rillflow.types import Ack, FailTask
from rillflow.types.routes import Route, post
from rillflow.wire import Client, Service
from rillflow.wire.server import bearer
from rillflow.wire.tokens import Keyring

TOKEN = "bench"
BIG = 1_000_000


class Put(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes to the service; `size` asks for as many back."""

    data: bytes = b""
    size: int = 0


class Got(msgspec.Struct, frozen=True, kw_only=True):
    data: bytes = b""


NEWS = post("/news", FailTask, Ack, "node", summary="A small call")
BYTES = post("/bytes", Put, Got, "node", summary="A large body, to the service or back")
ROUTES: dict[str, Route[Any, Any]] = {"/news": NEWS, "/bytes": BYTES}
BODIES = {path: route.body for path, route in ROUTES.items()}
REPLIES = {path: route.reply for path, route in ROUTES.items()}
Call = Callable[[str, Any], Awaitable[Any]]


class Work:
    """The work of every service for a call, whatever carries it."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._keyring = Keyring.of_run(TOKEN)
        self._decode = {path: msgspec.msgpack.Decoder(kind).decode for path, kind in BODIES.items()}
        self._count = Counter("requests", "Requests", registry=registry)
        self._seconds = Histogram("seconds", "Time to answer", registry=registry)
        self._data = bytes(BIG)

    def allowed(self, header: str) -> bool:
        return self._keyring.scope_of(bearer(header)) is not None

    async def answer(self, path: str, raw: bytes) -> bytes:
        with self._seconds.time():
            body = self._decode[path](raw)
            self._count.inc()
            if isinstance(body, FailTask):
                return msgspec.msgpack.encode(Ack(accepted=True, reason=body.cause))
            return msgspec.msgpack.encode(Got(data=self._data[: body.size]))


class Stack(NamedTuple):
    """`serve` tells its URL through the connection and serves until the process is killed."""

    serve: Callable[[Connection], None]
    client: Callable[[str], AbstractAsyncContextManager[Call]]


def _forever(told: Connection, start: Callable[[], Awaitable[str]]) -> None:
    async def work() -> None:
        told.send(await start())
        await asyncio.sleep(3600)

    asyncio.run(work())


def _listener() -> socket.socket:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # named as TCP: asyncio switches Nagle's algorithm off then
    listener.bind(("127.0.0.1", 0))
    return listener


# ---------------------------------------------------------------- ours


def serve_ours(told: Connection) -> None:
    data = bytes(BIG)

    async def take(news: FailTask) -> Ack:
        return Ack(accepted=True, reason=news.cause)

    async def put(body: Put) -> Got:
        return Got(data=data[: body.size])

    async def start() -> str:
        service = Service("bench", TOKEN)
        service.on(NEWS, take)
        service.on(BYTES, put)
        return await service.start()

    _forever(told, start)


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[Call]:
    client = Client(url, TOKEN)

    async def call(path: str, body: Any) -> Any:
        return await client.call(ROUTES[path], body)

    yield call
    await client.close()


# ---------------------------------------------------------------- aiohttp on both sides


def serve_aiohttp(told: Connection) -> None:
    work = Work()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if not work.allowed(request.headers.get("authorization", "")):
            return web.Response(status=401)
        return web.Response(body=await work.answer(request.path, await request.read()))

    async def start() -> str:
        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    _forever(told, start)


@asynccontextmanager
async def aiohttp_client(url: str) -> AsyncIterator[Call]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    decoders = {path: msgspec.msgpack.Decoder(kind).decode for path, kind in REPLIES.items()}
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=256), timeout=timeout
    ) as session:

        async def call(path: str, body: Any) -> Any:
            async with session.post(url + path, data=msgspec.msgpack.encode(body)) as response:
                return decoders[path](await response.read())

        yield call


# ---------------------------------------------------------------- starlette on uvicorn, as their documentation has it


def serve_starlette(told: Connection) -> None:
    work = Work()

    async def endpoint(request: Request) -> Response:
        if not work.allowed(request.headers.get("authorization", "")):
            return Response(status_code=401)
        return Response(await work.answer(request.url.path, await request.body()))

    async def start() -> str:
        listener = _listener()
        app = Starlette(routes=[StarletteRoute(path, endpoint, methods=["POST"]) for path in BODIES])
        config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, lifespan="off")
        start.serving = asyncio.create_task(uvicorn.Server(config).serve([listener]))  # type: ignore[attr-defined]
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    _forever(told, start)


# ---------------------------------------------------------------- frames of msgpack on one connection


FRAME = struct.Struct("<IIB")  # length, call, path


class Frames(asyncio.Protocol):
    """Length-prefixed messages in both directions."""

    def __init__(self, on_frame: Callable[[Frames, int, int, bytes], None]) -> None:
        self._on_frame = on_frame
        self._rest = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        at = 0
        while len(rest) - at >= FRAME.size:
            length, number, path = FRAME.unpack_from(rest, at)
            end = at + FRAME.size + length
            if len(rest) < end:
                break
            self._on_frame(self, number, path, bytes(rest[at + FRAME.size : end]))
            at = end
        del rest[:at]

    def send(self, number: int, path: int, data: bytes) -> None:
        if len(data) < 1 << 16:
            self.transport.write(FRAME.pack(len(data), number, path) + data)
        else:
            self.transport.write(FRAME.pack(len(data), number, path))
            self.transport.write(data)


PATHS = list(BODIES)


def serve_frames(told: Connection) -> None:
    work = Work()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(connection: Frames, number: int, path: int, data: bytes) -> None:
        connection.send(number, path, await work.answer(PATHS[path], data))

    def on_frame(connection: Frames, number: int, path: int, data: bytes) -> None:
        task = asyncio.get_running_loop().create_task(answer(connection, number, path, data))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def start() -> str:
        listener = _listener()
        await asyncio.get_running_loop().create_server(lambda: Frames(on_frame), sock=listener)
        return f"frames://127.0.0.1:{listener.getsockname()[1]}"

    _forever(told, start)


@asynccontextmanager
async def frames_client(url: str) -> AsyncIterator[Call]:
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[bytes]] = {}
    numbers = itertools.count()
    decoders = {path: msgspec.msgpack.Decoder(kind).decode for path, kind in REPLIES.items()}

    def on_frame(_: Frames, number: int, path: int, data: bytes) -> None:
        waiting[number].set_result(data)

    host, port = url.removeprefix("frames://").split(":")
    transport, connection = await loop.create_connection(lambda: Frames(on_frame), host, int(port))

    async def call(path: str, body: Any) -> Any:
        number = next(numbers)
        future = waiting[number] = loop.create_future()
        timer = loop.call_later(30, future.cancel)
        try:
            connection.send(number, PATHS.index(path), msgspec.msgpack.encode(body))
            return decoders[path](await future)
        finally:
            timer.cancel()
            del waiting[number]

    yield call
    transport.close()


STACKS = {
    "ours": Stack(serve_ours, ours),
    "aiohttp, both sides": Stack(serve_aiohttp, aiohttp_client),
    "starlette on uvicorn, aiohttp's client": Stack(serve_starlette, aiohttp_client),
    "frames of msgpack": Stack(serve_frames, frames_client),
}
