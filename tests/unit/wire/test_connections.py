"""Connections to a scripted service, which answers byte by byte, and to one that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress

import pytest

from rillflow.errors import DeadlineExceeded, Unavailable, WireError
from rillflow.types.routes import Route, get
from rillflow.wire import Client
from rillflow.wire.connections import Answer, Connections, within
from rillflow.wire.protocol import HEAD_LIMIT

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def read(path: str) -> Route[None, dict[str, str]]:
    return get(path, dict[str, str], "reader", summary="For this test")


@asynccontextmanager
async def peer(handler: Handler, most: int = 256) -> AsyncIterator[Connections]:
    """Connections to a server whose every connection is `handler`'s."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {"x-key": "k"}, most)
    try:
        yield connections
    finally:
        connections.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def asked(reader: asyncio.StreamReader) -> bytes:
    """The next request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(size)


async def none_is_free(connections: Connections) -> None:
    """Wait until the connections that were free are no longer usable."""
    async with asyncio.timeout(60):
        while any(connection.usable for connection in connections._free):  # noqa: ASYNC110 - it sends no event
            await asyncio.sleep(0.001)


def answering(*answers: bytes, seen: list[bytes] | None = None) -> Handler:
    """One answer for each request of a connection; then it is closed."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            request = await asked(reader)
            if seen is not None:
                seen.append(request)
            writer.write(answer)
            await writer.drain()

    return handler


async def test_one_connection_serves_call_after_call() -> None:
    seen: list[bytes] = []
    async with peer(answering(OK, OK, seen=seen), most=1) as connections:
        assert await connections.call("POST", "/a", b"body", 5) == Answer(200, b"ok")
        assert await connections.call("GET", "/b", b"", 5, {"range": "bytes=0-1"}) == Answer(200, b"ok")
    first, second = seen
    assert first.startswith(b"POST /a HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"x-key: k\r\n" in first
    assert first.endswith(b"content-length: 4\r\n\r\nbody")
    assert b"range: bytes=0-1\r\n" in second


async def test_an_answer_in_many_pieces() -> None:
    whole = b"HTTP/1.1 206 Partial Content\r\ncontent-length: 5\r\n\r\nhello"

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        for at in range(len(whole)):
            writer.write(whole[at : at + 1])
            await asyncio.sleep(0)

    async with peer(dribble) as connections:
        assert await connections.call("GET", "/", b"", 5) == Answer(206, b"hello")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", Answer(200, b"abc")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, Answer(200, b"ok")),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", Answer(503, b"")),
    ],
    ids=["chunks", "continue", "empty"],
)
async def test_answers_of_every_kind(answer: bytes, expected: Answer) -> None:
    async with peer(answering(answer)) as connections:
        assert await connections.call("POST", "/", b"x", 5) == expected


@pytest.mark.parametrize("size", [0, 1 << 16, (1 << 16) + 1, 8 << 20])
async def test_bodies_of_every_size_go_and_come(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = (await asked(reader)).partition(b"\r\n\r\n")[2]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(received) + received)
        await writer.drain()
        await reader.read()

    async with peer(echo) as connections:
        assert await connections.call("POST", "/", body, 20) == Answer(200, body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"220 mail.example ESMTP\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nlong: " + b"a" * (HEAD_LIMIT + 1),
    ],
    ids=["nothing", "half a head", "half a body", "not HTTP", "another protocol", "an endless head"],
)
async def test_what_is_no_whole_answer_is_a_connection_error(answer: bytes) -> None:
    async with peer(answering(answer)) as connections:
        with pytest.raises(ConnectionError):
            await connections.call("POST", "/", b"x", 5)


async def test_a_late_answer_is_nobodys() -> None:
    """A cancelled call closes its connection: the next call has another one, and its own answer."""
    late, second = asyncio.Event(), asyncio.Event()
    opened = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        mine = opened
        await asked(reader)
        if mine == 1:  # it is open before a call on it is given up
            writer.write(OK)
            await asked(reader)
        if mine == 2:
            second.set()
        if mine < 3:
            await late.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d" % mine)

    async with peer(handler, most=1) as connections:
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"
        with pytest.raises(TimeoutError):
            await connections.call("GET", "/", b"", 0.05)
        given_up = asyncio.create_task(connections.call("GET", "/", b"", 5))
        await asyncio.wait_for(second.wait(), 60)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        late.set()
        assert await connections.call("GET", "/", b"", 5) == Answer(200, b"3")


async def test_a_body_that_nobody_reads_to_its_end_is_not_the_next_calls() -> None:
    refusal = b"HTTP/1.1 413 Too Long\r\ncontent-length: 0\r\n\r\n"
    opened = 0

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal if opened == 1 else OK)
        await asyncio.sleep(5)

    async with peer(hasty) as connections:
        assert (await connections.call("POST", "/", bytes(32 << 20), 5)).status == 413
        assert (await connections.call("GET", "/", b"", 5)).status == 200
        assert opened == 2


@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\n", b"what?"], ids=["another answer", "noise"])
async def test_a_peer_that_says_more_than_it_was_asked_is_left(extra: bytes) -> None:
    async with peer(answering(OK + extra, OK)) as connections:
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"


async def test_a_peer_that_speaks_without_being_asked_is_left() -> None:
    spoken = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(OK.replace(b"ok", b"no"))
        spoken.set()
        await reader.read()

    async with peer(handler) as connections:
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"
        await asyncio.wait_for(spoken.wait(), 60)
        await none_is_free(connections)
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"


async def test_a_free_connection_that_was_closed_or_grew_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await answering(OK)(reader, writer)
        if opened == 3:
            await answering(OK)(reader, writer)

    async with peer(once, most=1) as connections:
        for _ in range(2):
            assert (await connections.call("GET", "/", b"", 5)).body == b"ok"
            await none_is_free(connections)  # the close is noticed
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"
        monkeypatch.setattr("rillflow.wire.connections._KEPT_SECONDS", -1.0)
        assert (await connections.call("GET", "/", b"", 5)).body == b"ok"
    assert opened == 4


async def test_the_bound_holds_and_turns_come_in_order() -> None:
    at_work = most = 0
    served: list[int] = []
    full = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_work, most
        while True:
            request = await asked(reader)
            at_work += 1
            most = max(most, at_work)
            if most == 3:
                full.set()
            await full.wait()
            await asyncio.sleep(0.002)
            served.append(int(request.split(b" ")[1][1:]))
            at_work -= 1
            writer.write(OK)

    async with peer(handler, most=3) as connections:
        await asyncio.gather(*(connections.call("GET", f"/{n}", b"", 10) for n in range(30)))
        assert most == 3
        assert all(abs(at - n) <= 3 for at, n in enumerate(served))
        # A call that is cancelled while it waits, or as it gets a connection, takes no other call's connection.
        tasks = [asyncio.create_task(connections.call("GET", f"/{n}", b"", 10)) for n in range(30)]
        await asyncio.sleep(0.01)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(one == Answer(200, b"ok") for one in done[1::2])
        assert connections._left + len(connections._free) == 3


async def test_waiting_for_a_turn_has_the_callers_deadline() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with peer(silent, most=1) as connections:
        first = asyncio.create_task(connections.call("GET", "/", b"", 5))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await connections.call("GET", "/", b"", 0.05)
        assert not connections._turns  # a cancelled call does not wait in the queue
        second = asyncio.create_task(connections.call("GET", "/", b"", 5))
        await asyncio.sleep(0.02)
        connections.close()
        for task in (first, second):
            with pytest.raises(ConnectionError):
                await task
        with pytest.raises(ConnectionError):
            await connections.call("GET", "/", b"", 5)


async def test_a_connection_that_opens_after_the_close_is_closed() -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()

    async with peer(wait) as connections:
        asking = asyncio.create_task(connections.call("GET", "/", b"", 5))
        await asyncio.sleep(0)  # it is being opened
        connections.close()
        with pytest.raises(ConnectionError, match="the client was closed"):
            await asking
        await asyncio.wait_for(gone.wait(), 60)


async def test_a_silent_peer_is_late_and_an_absent_one_cannot_be_reached() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with peer(silent) as connections:
        client = Client(f"http://127.0.0.1:{connections._port}", "t", peer="it")
        with pytest.raises(DeadlineExceeded, match="it did not answer /x in time"):
            await client._once(read("/x"), b"", 0.05)
        await client.close()
    with pytest.raises(Unavailable, match="cannot reach it: ConnectionRefusedError"):
        await client._once(read("/x"), b"", 5)


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://ä"])
async def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(WireError, match="not the URL of a service"):
        await Client(url, "t").call(read("/"), None)


@pytest.mark.parametrize("token", ["a\r\nb: c", "a\n", "ä"])
async def test_no_token_writes_headers_of_its_own(token: str) -> None:
    with pytest.raises(WireError, match="authorization"):
        await Client("http://127.0.0.1:1", token).call(read("/"), None)


@pytest.mark.parametrize("path", ["/a b", "/a\r\nb", "/ä"])
async def test_no_path_writes_headers_either(path: str) -> None:
    with pytest.raises(WireError, match="not a path"):
        await Client("http://127.0.0.1:1", "t").call(read(path), None)


async def test_a_future_within_its_time_and_after_it() -> None:
    loop = asyncio.get_running_loop()
    soon: asyncio.Future[int] = loop.create_future()
    loop.call_soon(soon.set_result, 3)
    assert await within(soon, 5) == 3
    never: asyncio.Future[int] = loop.create_future()
    with pytest.raises(TimeoutError):
        await within(never, 0.01)
    assert never.done()


# ---------------------------------------------------------------- answers that are read as they arrive


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_stream_is_read_as_it_arrives_and_its_connection_is_used_again() -> None:
    go_on, served = asyncio.Event(), 0

    async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        while await reader.readuntil(b"\r\n\r\n"):
            served += 1
            writer.write(CHUNKED + b"3\r\none\r\n")
            await go_on.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with peer(dripping) as connections:
        for _ in range(2):
            go_on.clear()
            with closing(await connections.begin("GET", "/", b"", 60)) as answer:
                assert (answer.status, await answer.read(60)) == (200, b"one")
                go_on.set()
                assert await answer.read(60) == b"two"
                assert (await answer.read(60), answer.ended) == (b"", True)
        assert (served, len(connections._free)) == (2, 1)


@pytest.mark.parametrize("end", ["left", "cut", "closed"])
async def test_a_stream_that_ends_early_ends_its_connection(end: str) -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"3\r\none\r\n")
        if end == "cut":
            writer.close()
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with peer(endless, most=1) as connections:
        with suppress(ConnectionError), closing(await connections.begin("GET", "/", b"", 60)) as answer:
            assert await answer.read(60) == b"one"
            if end == "closed":
                connections.close()
            if end != "left":
                await answer.read(60)
                pytest.fail("the stream has no end")
        await asyncio.wait_for(gone.wait(), 60)
        assert (connections._free, connections._left) == ([], 1)


async def test_a_stream_that_is_not_read_pauses_its_sender() -> None:
    sent = 0

    async def flooding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        with suppress(ConnectionError):
            while sent < 64 << 20:
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                await writer.drain()
                sent += 1 << 16

    async with peer(flooding) as connections:
        with closing(await connections.begin("GET", "/", b"", 60)) as answer:
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 32 << 20
            while sent < 40 << 20:
                assert await answer.read(60)
