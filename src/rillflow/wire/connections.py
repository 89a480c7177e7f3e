"""A pool of HTTP/1.1 connections to one service, for the calls between our own processes.

Bodies are sent whole; an answer comes whole (`call`) or as it arrives (`begin`). A call takes an idle connection or
opens one. At the limit it waits in a queue, within its own deadline. A call that ends early closes its connection,
because the answer may still arrive. Decision 022 says why this is not a library.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from rillflow.errors import WireError
from rillflow.wire.protocol import HEAD_LIMIT, IDLE_SECONDS

T = TypeVar("T")

CONNECTIONS = 256  # to one service
_KEPT_SECONDS = 0.8 * IDLE_SECONDS  # the service may close an older idle connection just as a call begins
_READ_AHEAD = 512 << 10  # unread bytes of an arriving answer; more pause the connection
_ONE_WRITE = 64 << 10  # a body up to this size is sent in one write with its head


async def within(future: asyncio.Future[T], seconds: float) -> T:
    """Return the result of `future`, or raise TimeoutError after `seconds`.

    The future must belong to the caller alone: at the deadline it ends with the TimeoutError, and cancelling the caller
    cancels it. This costs one timer, where `asyncio.timeout` also cancels a task.
    """
    timer = asyncio.get_running_loop().call_later(seconds, _expire, future)
    try:
        return await future
    finally:
        timer.cancel()


def _expire(future: asyncio.Future[T]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


class Answer(NamedTuple):
    status: int
    body: bytes


class Arriving:
    """An answer that is read as it arrives. Call `close` when it was read, or is no longer wanted.

    `status` is 0 until its head is here.
    """

    def __init__(self, connection: Connection, release: Callable[[Connection], None]) -> None:
        self.status = 0
        self.ended = False  # the whole body is here
        self._connection = connection
        self._release = release
        self._parts: list[bytes] = []
        self._size = 0
        self._error: ConnectionError | None = None
        self._news: asyncio.Future[None] | None = None

    async def begin(self, head: bytes, body: bytes, seconds: float) -> None:
        """Send the request and return once the head of the answer is here."""
        self._connection.begin(self, head, body)
        while not self.status:
            await self._changed(seconds)

    async def read(self, seconds: float) -> bytes:
        """Return what was not read of the body, at least one byte; empty at its end.

        TimeoutError if nothing comes for `seconds`, ConnectionError if the connection fails.
        """
        while not self._parts and not self.ended:
            await self._changed(seconds)
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._connection.resume()
        return data

    async def _changed(self, seconds: float) -> None:
        if self._error is not None:
            raise self._error
        self._news = asyncio.get_running_loop().create_future()
        await within(self._news, seconds)

    def close(self) -> None:
        """Make the connection ready for another call; one whose answer is not complete is closed."""
        self._connection.end()
        self._release(self._connection)

    # ------------------------------------------------------------ called by the connection

    def add(self, part: bytes) -> bool:
        """Add a part of the body. Returns whether enough of it waits to be read."""
        self._parts.append(part)
        self._size += len(part)
        self.wake()
        return self._size > _READ_AHEAD

    def fail(self, error: ConnectionError) -> None:
        self._error = error
        self.wake()

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, with one call at a time. An answer that is not valid HTTP ends the connection and its call."""

    def __init__(self) -> None:
        self.free_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._arriving: Arriving | None = None  # until its end is here
        self._paused = False
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._head = 0  # bytes read of the current answer while its head is incomplete
        self._in_head = True

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, head: bytes, body: bytes, seconds: float) -> Answer:
        """Return the answer. TimeoutError if it is not complete in time, ConnectionError if the connection fails."""
        if self._transport is None:
            raise ConnectionResetError("the connection was closed")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._send(self._transport, head, body)
        try:
            return await within(answer, seconds)
        except BaseException:
            self.abort()
            raise
        finally:
            self._answer = None
            self._end_sending()

    def begin(self, arriving: Arriving, head: bytes, body: bytes) -> None:
        """Send a request whose answer is `arriving`. Call `end` when it was read, or is no longer wanted."""
        if self._transport is None:
            raise ConnectionResetError("the connection was closed")
        self._arriving = arriving
        self._send(self._transport, head, body)

    def end(self) -> None:
        """Make the connection ready for another call; one whose answer is not complete is closed."""
        if self._arriving is not None:
            self.abort()
            self._arriving = None
        self.resume()
        self._end_sending()

    def resume(self) -> None:
        """Receive again after a pause."""
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    def _send(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        if len(body) <= _ONE_WRITE:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def _end_sending(self) -> None:
        """Close a connection whose request was answered before it was sent whole: its rest must not reach the next
        call."""
        if self._transport is not None and self._transport.get_write_buffer_size():
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None and self._arriving is None:
            self.abort()  # data without a request
            return
        if self._in_head:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the answer is not valid HTTP: {error}"))
            return
        if self._in_head and self._head > HEAD_LIMIT:
            self._fail(ConnectionError(f"the head of the answer has more than {HEAD_LIMIT} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionResetError(f"the connection was cut: {error}" if error else "the connection was closed"))

    def _fail(self, error: ConnectionError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        if self._arriving is not None:
            self._arriving.fail(error)
        self.abort()

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        if self._arriving is None and (self._answer is None or self._answer.done()):
            self.abort()  # a second answer to one request

    def on_headers_complete(self) -> None:
        self._in_head = False
        status = self._parser.get_status_code()
        if self._arriving is not None and status >= 200:
            self._arriving.status = status
            self._arriving.wake()

    def on_body(self, part: bytes) -> None:
        if self._arriving is None:
            self._body.append(part)
        elif self._arriving.add(part) and not self._paused and self._transport is not None:
            self._transport.pause_reading()
            self._paused = True

    def on_message_complete(self) -> None:
        parts, self._body = self._body, []
        self._in_head, self._head = True, 0
        status = self._parser.get_status_code()
        if status < 200:  # informational: the final answer follows
            return
        if not self._parser.should_keep_alive():
            cast("asyncio.Transport", self._transport).close()
        if self._arriving is not None:
            self._arriving.ended = True
            self._arriving.wake()
            self._arriving = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(status, parts[0] if len(parts) == 1 else b"".join(parts)))


class Connections:
    """A pool of at most `most` connections to `url`, used from one event loop."""

    def __init__(
        self, url: str, headers: dict[str, str], most: int = CONNECTIONS, connect: float = float("inf")
    ) -> None:
        """`connect` bounds the seconds for opening a connection, beside the deadline of the call."""
        parts = _split(url)
        self._host = parts.hostname or ""
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/")
        self._headers = _lines({"host": parts.netloc.rpartition("@")[2], **headers})
        self._connect = connect
        self._left = most  # connections that may still be opened
        self._free: list[Connection] = []  # a stack: surplus connections stay idle and expire
        self._used: set[Connection] = set()
        self._turns: deque[asyncio.Future[Connection | None]] = deque()
        self._closed = False

    async def call(
        self, method: str, path: str, body: bytes, seconds: float, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request and return its answer. OSError if the service is unreachable or drops the connection."""
        head = self._head(method, path, len(body), headers)
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        connection = self._kept(loop.time()) or await self._new(end)
        self._used.add(connection)
        try:
            return await connection.call(head, body, end - loop.time())
        finally:
            self._release(connection)

    async def begin(self, method: str, path: str, body: bytes, seconds: float) -> Arriving:
        """Send a request and return its answer, to be closed, once its head is here, within `seconds`."""
        head = self._head(method, path, len(body), None)
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        connection = self._kept(loop.time()) or await self._new(end)
        self._used.add(connection)
        arriving = Arriving(connection, self._release)
        try:
            await arriving.begin(head, body, end - loop.time())
        except BaseException:
            arriving.close()
            raise
        return arriving

    def _release(self, connection: Connection) -> None:
        self._used.discard(connection)
        connection.free_since = asyncio.get_running_loop().time()
        self._hand_on(connection)

    def close(self) -> None:
        """Close all connections. Calls in progress fail."""
        self._closed = True
        for connection in [*self._free, *self._used]:
            connection.abort()
        for turn in self._turns:
            if not turn.done():
                turn.set_exception(_closed())

    def _head(self, method: str, path: str, size: int, headers: dict[str, str] | None) -> bytes:
        if not path.isascii() or not path.isprintable() or " " in path:
            raise WireError(f"{path!r} is not a path", "percent-encode its special characters")
        more = _lines(headers) if headers else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{more}content-length: {size}\r\n\r\n"
        return head.encode("ascii")

    # ------------------------------------------------------------ turns

    def _kept(self, now: float) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.usable and now - connection.free_since < _KEPT_SECONDS:
                return connection
            connection.abort()
            self._left += 1
        return None

    async def _new(self, end: float) -> Connection:
        """Open a connection, or wait until another call releases one."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise _closed()
        if self._left > 0:
            self._left -= 1
            return await self._opened(end - loop.time())
        turn: asyncio.Future[Connection | None] = loop.create_future()
        self._turns.append(turn)
        try:
            connection = await within(turn, end - loop.time())
        except BaseException:
            if turn in self._turns:
                self._turns.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:
                self._hand_on(turn.result())  # cancelled just after a connection was assigned to it
            raise
        if connection is not None and connection.usable:
            return connection
        return await self._opened(end - loop.time())

    async def _opened(self, seconds: float) -> Connection:
        try:
            async with asyncio.timeout(min(seconds, self._connect)):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, self._host, self._port, ssl=self._secure or None
                )
        except BaseException:
            self._hand_on(None)
            raise
        if self._closed:
            self._hand_on(connection)
            raise _closed()
        return connection

    def _hand_on(self, connection: Connection | None) -> None:
        """Give a connection, or the right to open one, to the call that has waited longest."""
        usable = connection if connection is not None and connection.usable and not self._closed else None
        if connection is not None and usable is None:
            connection.abort()
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(usable)
                return
        if usable is None:
            self._left += 1
        else:
            self._free.append(usable)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number, or out of range
        usable = False
    if not usable or not url.isascii():
        raise WireError(f"{url!r} is not the URL of a service", "it looks like http://127.0.0.1:8000")
    return parts


def _closed() -> ConnectionResetError:
    return ConnectionResetError("the client was closed")


def _lines(headers: dict[str, str]) -> str:
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise WireError(f"the header {name} contains characters that HTTP does not allow", "check the token")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
