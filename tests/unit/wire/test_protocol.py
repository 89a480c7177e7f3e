"""Connections that do what no client should: each ends as documented, and the service goes on serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from raw_http import connected, exchanged
from rillflow.types.routes import TEXT, Route, raw
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response
from rillflow.wire.routing import Gate

KEY = b"authorization: Bearer secret\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n" + KEY + b"\r\n"


def route(method: str, path: str) -> Route[Any, Any]:
    return raw(method, path, "node", summary="For this test", answers={TEXT: ()})


class Held(Service):
    """One route that answers when the test says so, and counts disconnected clients."""

    url = ""

    def __init__(self) -> None:
        super().__init__("held", "secret", body_limit=1000)
        self.gate = asyncio.Event()
        self.begun = 0
        self.gone = 0
        self.bound = Gate(2, "requests")
        self.raw(route("POST", "/wait"), self._wait, gate=self.bound)
        self.raw(route("POST", "/read"), self._read)
        self.raw(route("GET", "/things/{name}/{number:int}"), self._thing)

    async def _wait(self, request: Request) -> Response:
        self.begun += 1
        request.when_lost(self._leave)
        await request.while_connected(self.gate.wait)
        return Response(b"waited")

    def _leave(self) -> None:
        self.gone += 1

    async def _read(self, request: Request) -> Response:
        return Response(b"%d" % len(await request.read(1000)))

    async def _thing(self, request: Request) -> Response:
        return Response("/".join(request.params.values()).encode())


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    service = Held()
    service.url = await service.start()
    yield service
    service.gate.set()
    await service.stop()


async def still_serves(service: Held) -> None:
    assert b" 200 " in await exchanged(service.url, GET)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


def post(path: bytes, head: bytes = b"", body: bytes = b"") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + KEY + head + b"\r\n" + body


WAIT = post(b"/wait", b"content-length: 0\r\n")


@pytest.mark.parametrize(
    "start", [b"", b"\r\n\r\n", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bea"]
)
async def test_a_head_that_does_not_come_ends_the_connection(
    held: Held, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("rillflow.wire.protocol.HEAD_SECONDS", 0.1)
    async with connected(held.url) as line:
        line.send(start)
        assert await line.all() == b""
    await still_serves(held)


async def test_a_head_that_drips_ends_with_the_same_deadline(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.protocol.HEAD_SECONDS", 0.2)
    async with connected(held.url) as line:
        line.send(GET)  # the first request is in time; the deadline is for the second's head
        assert b" 200 " in await line.answer()
        line.send(b"GET /health HTTP/1.1\r\n")
        end = asyncio.create_task(line.all())
        for _ in range(400):
            if end.done():
                break
            line.send(b"a: b\r\n")
            await asyncio.sleep(0.01)
        assert await end == b""
    await still_serves(held)


async def test_a_connection_with_a_request_at_work_has_no_deadline(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.protocol.HEAD_SECONDS", 0.05)
    async with connected(held.url) as line:
        line.send(WAIT)
        await until(lambda: held.begun == 1)
        await asyncio.sleep(0.2)
        held.gate.set()
        assert (await line.answer()).endswith(b"waited")


async def test_the_number_of_connections_is_bounded(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.protocol.CONNECTIONS", 2)
    async with connected(held.url) as first:
        async with connected(held.url) as second:
            for line in (first, second):
                line.send(GET)
                assert b" 200 " in await line.answer()
            refused = await exchanged(held.url, b"")
            assert b" 503 " in refused
            assert b"retry-after: 1" in refused
            first.send(GET)  # open connections go on
            assert b" 200 " in await first.answer()
        await until(lambda: len(held._listener.connections) == 1)
        await still_serves(held)


async def test_pipelined_requests_are_answered_in_order(held: Held) -> None:
    last = b"GET /nothing HTTP/1.1\r\nconnection: close\r\n" + KEY + b"\r\n"
    async with connected(held.url) as line:
        line.send(GET + post(b"/read", b"content-length: 3\r\n", b"abc") + last)
        answers = await line.all()
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


async def test_who_pipelines_and_goes_is_gone_for_what_is_at_work(held: Held) -> None:
    async with connected(held.url) as line:
        line.send(WAIT + GET)
        await until(lambda: held.begun == 1)
    await until(lambda: held.gone == 1)
    await still_serves(held)


async def test_an_older_http(held: Held) -> None:
    async with connected(held.url) as line:
        line.send(b"GET /health HTTP/1.0\r\n" + KEY + b"\r\n")
        answer = await line.all()
    assert b" 200 " in answer
    assert b"connection: close" in answer


WRONG = {
    "no request": b"\x00\x01\x02\x03\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a broken version": b"GET /health HTTP/9.9\r\n\r\n",
    "a path that is not ASCII": b"GET /h\xff\xfe HTTP/1.1\r\n\r\n",
    "a broken header": b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    "a chunk with a bad size": post(b"/read", b"transfer-encoding: chunked\r\n", b"xyz\r\nabc\r\n"),
    "a chunk with a negative size": post(b"/read", b"transfer-encoding: chunked\r\n", b"-5\r\nabc\r\n"),
    "a chunk with a giant size": post(b"/read", b"transfer-encoding: chunked\r\n", b"f" * 40 + b"\r\nabc\r\n"),
    "two lengths": post(b"/read", b"content-length: 3\r\ncontent-length: 4\r\n", b"abcd"),
    "a negative length": post(b"/read", b"content-length: -1\r\n"),
    "a length and chunks": post(b"/read", b"content-length: 3\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_not_http_is_a_400_and_the_end(held: Held, name: str) -> None:
    async with connected(held.url) as line:
        line.send(WRONG[name])
        assert b" 400 " in (await line.all()).split(b"\r\n")[0]
    await still_serves(held)


async def test_a_declared_length_past_the_limit_is_refused_before_the_body(held: Held) -> None:
    for length in (b"1001", b"9" * 18, b"9" * 19):
        answer = await exchanged(
            held.url, post(b"/read", b"content-length: " + length + b"\r\nexpect: 100-continue\r\n")
        )
        assert b" 413 " in answer
        assert b"100 Continue" not in answer
    async with connected(held.url) as line:
        line.send(post(b"/read", b"content-length: 1000\r\nexpect: 100-continue\r\n"))
        assert b"100 Continue" in await line.answer()
        line.send(b"a" * 1000)
        assert (await line.answer()).endswith(b"1000")


async def test_chunks_past_the_limit_are_refused_as_they_come(held: Held) -> None:
    chunks = b"3e8\r\n" + b"a" * 1000 + b"\r\n1\r\na\r\n"
    assert b" 413 " in await exchanged(held.url, post(b"/read", b"transfer-encoding: chunked\r\n", chunks))
    await still_serves(held)


async def test_the_rest_of_a_refused_body_has_a_deadline(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.protocol.HEAD_SECONDS", 0.1)
    async with connected(held.url) as line:
        line.send(post(b"/read", b"content-length: 100000\r\n"))
        assert b" 413 " in await line.answer()
        line.send(b"a" * 1000)
        assert await line.all() == b""
    await still_serves(held)


async def test_a_body_whose_sender_goes(held: Held) -> None:
    async with connected(held.url) as line:
        line.send(post(b"/read", b"content-length: 100\r\n", b"abc"))
    await still_serves(held)


async def test_an_upgrade_is_not_made(held: Held) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
    assert b" 200 " in await exchanged(held.url, GET[:-2] + upgrade)


async def test_a_gate_bounds_what_is_at_work(held: Held) -> None:
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(connected(held.url)) for _ in range(2)]
        for line in lines:
            line.send(WAIT)
        await until(lambda: held.begun == 2)
        refused = await exchanged(held.url, WAIT)
        assert b" 429 " in refused
        assert b"retry-after: 1" in refused
        held.gate.set()
        for line in lines:
            assert b"waited" in await line.answer()
        await until(lambda: held.bound.at_work == 0)


ROUTES = {
    b"GET /things/a%20b/7": b"a b/7",
    b"GET /things/a/seven": b" 404 ",
    b"GET /things/a/" + b"9" * 30: b" 404 ",
    b"GET /things/a": b" 404 ",
    b"GET /health/": b" 404 ",
    b"GET health": b" 400 ",
    b"DELETE /health": b" 405 ",
    b"PUT /read": b"allow: POST\r\n",
    b"HEAD /health": b" 200 ",
}


@pytest.mark.parametrize("request_line", ROUTES)
async def test_routes(held: Held, request_line: bytes) -> None:
    answer = await exchanged(held.url, request_line + b" HTTP/1.1\r\nhost: x\r\n" + KEY + b"\r\n")
    assert ROUTES[request_line] in answer
    assert answer.endswith(b"\r\n\r\n") == request_line.startswith(b"HEAD")
