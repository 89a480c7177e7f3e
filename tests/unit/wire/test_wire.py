"""Server and client bases over real HTTP."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import aiohttp
import pytest

from rillflow.errors import (
    BadRequest,
    DeadlineExceeded,
    LeaseLost,
    RillflowError,
    RunError,
    Unauthorized,
    Unavailable,
    WireError,
)
from rillflow.types import Ack, FailTask
from rillflow.types.routes import get, post
from rillflow.wire import Client, LoopThread, Service
from rillflow.wire.protocol import HEAD_LIMIT
from rillflow.wire.routing import Common

FAIL = post("/fail", FailTask, Ack, "node", summary="Fail")
NEWS = FailTask(task="t", attempt="a", node="n", cause="c", error="e")


class Echo(Service):
    """Answers by what the cause asks for."""

    def __init__(self) -> None:
        super().__init__("echo", "secret", body_limit=4096)
        self.seen = 0
        self.on(FAIL, self.fail)

    async def fail(self, news: FailTask) -> Ack:
        self.seen += 1
        match news.cause:
            case "lost":
                raise LeaseLost("not yours", "lease again")
            case "busy" if self.seen < 3:
                raise Unavailable("starting")
            case "bug":
                raise KeyError("oops")
            case "slow":
                await asyncio.sleep(5)
        return Ack(accepted=True, reason=news.error)


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, str]]:
    service = Echo()
    yield service, await service.start()
    await service.stop()


@pytest.fixture
async def client(echo: tuple[Echo, str]) -> AsyncIterator[Client]:
    client = Client(echo[1], "secret", peer="echo", jitter=random.Random(0))
    yield client
    await client.close()


async def test_round_trip(client: Client) -> None:
    assert await client.call(FAIL, NEWS) == Ack(accepted=True, reason="e")


async def test_errors_keep_their_kind_message_and_hint(client: Client) -> None:
    with pytest.raises(LeaseLost, match="not yours") as caught:
        await client.call(FAIL, FailTask(task="t", attempt="a", node="n", cause="lost", error="e"))
    assert caught.value.hint == "lease again"


async def test_503_is_retried(client: Client, echo: tuple[Echo, str]) -> None:
    await client.call(FAIL, FailTask(task="t", attempt="a", node="n", cause="busy", error="e"))
    assert echo[0].seen == 3


async def test_a_bug_is_answered_and_the_service_lives(client: Client) -> None:
    with pytest.raises(RillflowError, match="KeyError"):
        await client.call(FAIL, FailTask(task="t", attempt="a", node="n", cause="bug", error="e"))
    assert (await client.call(FAIL, NEWS)).accepted


async def test_deadline(client: Client) -> None:
    slow = FailTask(task="t", attempt="a", node="n", cause="slow", error="e")
    with pytest.raises(DeadlineExceeded, match="echo"):
        await client.call(FAIL, slow, deadline=0.2)


async def test_unreachable_peer_ends_in_an_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = Client(f"http://127.0.0.1:{port}", "secret", peer="nobody")
    with pytest.raises(DeadlineExceeded, match="nobody did not answer"):
        await client.call(Common.health, None, deadline=0.3)
    await client.close()


async def test_a_stranger_does_not_learn_which_routes_there_are(echo: tuple[Echo, str]) -> None:
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": ""}):
            async with session.get(echo[1] + "/no-such-route", headers=headers) as response:
                assert response.status == 401
    client = Client(echo[1], "wrong")
    with pytest.raises(Unauthorized, match="token"):
        await client.call(Common.health, None)
    await client.close()


async def test_body_limit(client: Client) -> None:
    fits = FailTask(task="t", attempt="a", node="n", cause="c", error="e" * 4000)
    assert (await client.call(FAIL, fits)).accepted
    with pytest.raises(BadRequest, match="4096"):
        await client.call(FAIL, FailTask(task="t", attempt="a", node="n", cause="c", error="e" * 4096))


@pytest.mark.parametrize("body", [{"task": 1}, {"unknown": "x"}, [1, 2], "text", None])
async def test_wrong_bodies_are_named(client: Client, body: object) -> None:
    with pytest.raises(BadRequest, match="/fail"):
        await client.call(replace(FAIL, body=object), body)


async def test_metrics_count_requests(client: Client, echo: tuple[Echo, str]) -> None:
    await client.call(FAIL, NEWS)
    async with (
        aiohttp.ClientSession(headers={"authorization": "Bearer secret"}) as session,
        session.get(echo[1] + "/metrics") as response,
    ):
        assert 'rillflow_requests_total{route="/fail",status="200"} 1.0' in await response.text()


async def test_port_in_use_is_clear(echo: tuple[Echo, str]) -> None:
    with pytest.raises(RunError, match=r"cannot listen on 127\.0\.0\.1") as caught:
        await Echo().start(port=int(echo[1].rsplit(":", 1)[1]))
    assert "port" in caught.value.hint


def test_a_service_without_token_is_refused() -> None:
    with pytest.raises(RunError, match="needs a token"):
        Service("open", "")


def test_loop_thread_runs_and_times_out() -> None:
    thread = LoopThread("test")

    async def value() -> int:
        return 3

    assert thread.run(value(), 60.0) == 3
    with pytest.raises(TimeoutError):
        thread.run(asyncio.sleep(60), 0.05)
    thread.close()


async def _sent(url: str, head: bytes, wait: float = 60.0) -> bytes:
    """Return the service's answer to raw bytes, before or after it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        writer.write(head)
        return await asyncio.wait_for(reader.read(1 << 16), wait)
    finally:
        writer.close()


def _head(size: int, end: bytes = b"\r\n\r\n") -> bytes:
    """A request to /health whose path, header names and values have `size` bytes together."""
    rest = b"/healthhostxauthorizationBearer secretbig"
    start = b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\nbig: "
    return start + b"a" * (size - len(rest)) + end


async def test_head_limit(echo: tuple[Echo, str]) -> None:
    assert b" 200 " in await _sent(echo[1], _head(HEAD_LIMIT))
    assert b" 400 " in await _sent(echo[1], _head(HEAD_LIMIT + 1))
    with suppress(ConnectionError):  # hung up while we still wrote
        assert b" 400 " in await _sent(echo[1], _head(HEAD_LIMIT + (8 << 20), end=b""))


async def test_a_body_that_never_ends_is_given_up(echo: tuple[Echo, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.wire.messages.BODY_SECONDS", 0.05)
    head = b"POST /fail HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-length: 100\r\n\r\nabc"
    assert b" 408 " in await _sent(echo[1], head)


async def test_a_reply_of_another_type_is_a_wire_error(client: Client) -> None:
    with pytest.raises(WireError, match="something else"):
        await client.call(get("/health", int, "reader", summary="Another"), None)


async def test_answers_are_not_held_back_for_an_acknowledgement(echo: tuple[Echo, str]) -> None:
    """Accepted connections are known as TCP, so asyncio switches Nagle's algorithm off: an answer is one round trip."""
    server = echo[0]._listener._server
    assert server is not None
    (listener,) = server.sockets
    assert listener.proto == socket.IPPROTO_TCP
