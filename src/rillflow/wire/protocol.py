"""The server's side of HTTP/1.1: asyncio's protocols and httptools' parser, with a bound on everything.

Heads are bounded and must arrive within a deadline. Idle connections are closed, and the number of connections is
bounded. All this applies before a token is checked. At most `_AHEAD` bytes of a body are read before a handler asks for
it. Pipelined requests are answered one after the other.

Left out on purpose: TLS, upgrades, trailers and compression.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools

from rillflow.wire.messages import NO_BODY, Request, Response, Stream

log = logging.getLogger(__name__)

HEAD_LIMIT = 64 << 10  # bytes of the request line and all headers; tokens and paths are far shorter
HEAD_SECONDS = 10.0  # from a connection's beginning, or a head's first byte, to its end
IDLE_SECONDS = 75  # between requests: longer than clients keep their pooled connections
CONNECTIONS = 16384  # of one service
STOP_SECONDS = 1.0  # for requests at work when a service stops
_AHEAD = 64 << 10  # bytes of bodies that are received before a handler reads them
_PIPELINED = 16  # requests that wait behind the one at work
_ONE_WRITE = 64 << 10  # a body up to this size is sent in one write with its head
_LOOK = 0.5  # seconds between two looks at the deadlines of connections
_BACKLOG = 2048

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}

Answer = Callable[[Request, "Connection"], Awaitable[None]]


class Listener:
    """Accepts connections on a socket; `answer` answers each of their requests and sends the response."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.name = name
        self.answer = answer
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self._server: asyncio.Server | None = None
        self._looking: asyncio.TimerHandle | None = None

    async def start(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), sock=sock, backlog=_BACKLOG)
        self._looking = loop.call_later(_LOOK, self._look)

    async def stop(self) -> None:
        """Accept nothing more, let requests at work end within `STOP_SECONDS`, then cancel them and hang up."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.close_when_idle()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=STOP_SECONDS)
        left = tuple(self.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in tuple(self.connections):
            connection.abort()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.sleep(0)  # the event loop closes the sockets in its next iteration

    def _look(self) -> None:
        """Close connections whose head or request is overdue. One timer serves all: most deadlines are met."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self.connections):
            if connection.deadline < now:
                connection.abort()  # closing would wait for a client that does not read what was sent
        self._looking = loop.call_later(_LOOK, self._look)


class Connection(asyncio.Protocol):
    """One connection. A request past a bound is answered, if HTTP has a status for it, and the connection closed."""

    def __init__(self, listener: Listener) -> None:
        self.deadline = float("inf")  # when the connection is hung up on unless something happens
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._in_head = False
        self._head = 0
        self._size = 0  # of the headers
        self._keep = True  # the connection may carry another request
        self._arriving: Request | None = None  # its body is not whole yet
        self._at_work: Request | None = None
        self._behind: deque[tuple[Request, bool]] = deque()
        self._paused = False
        self._room: asyncio.Future[None] | None = None  # while the client does not keep up
        self._deaf = False  # nothing that comes is read any more
        self._complaint = ""  # the fault of the bytes behind the requests that are still to be answered

    # ------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._listener.connections.add(self)
        if len(self._listener.connections) > CONNECTIONS:
            self._deaf = True
            self._refuse(503, "Too many connections", "retry-after: 1\r\n")
        self.deadline = self._loop.time() + HEAD_SECONDS

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._listener.connections.discard(self)
        self._behind.clear()
        if self._arriving is not None:
            self._arriving.lose()
        if self._at_work is not None:
            self._at_work.lose()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        # The first piece may begin with the end of an earlier body and is not counted: it is bounded by the socket.
        if self._in_head:
            self._head += len(data)
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # not upgraded: the request is answered as it is, and nothing follows it
        except httptools.HttpParserError as error:
            self._complain(f"Invalid HTTP request: {error.__context__ or error}")
            return
        if self._in_head and self._head > HEAD_LIMIT:
            self._complain(f"The head of a request has at most {HEAD_LIMIT} bytes")
        self._pause_or_resume()

    def pause_writing(self) -> None:
        if self._room is None:
            self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._in_head, self._head, self._size = True, 0, 0
        self._url, self._headers = b"", {}
        if self._at_work is None:
            self.deadline = self._loop.time() + HEAD_SECONDS

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._size += len(name) + len(value)
        if key in self._headers:
            text = f"{self._headers[key]}{'; ' if key == 'cookie' else ', '}{text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        self._in_head = False
        # The parser reports an exception raised here as an invalid request.
        if len(self._url) + self._size > HEAD_LIMIT:
            raise ValueError(f"the head has more than {HEAD_LIMIT} bytes")
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/"):
            path = httptools.parse_url(self._url).path
        text = path.decode("ascii")
        request = Request(
            self._parser.get_method().decode("ascii"),
            unquote(text) if "%" in text else text,
            query.decode("ascii"),
            self._headers,
        )
        self._arriving = request
        keep = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        if self._at_work is None:
            self._begin(request, keep)
        else:
            self._behind.append((request, keep))

    def on_body(self, part: bytes) -> None:
        if self._arriving is not None:  # else the rest of a body that was refused
            self._arriving.add(part)

    def on_message_complete(self) -> None:
        if self._arriving is not None:
            self._arriving.end()
            self._arriving = None
        if self._at_work is None:
            self.deadline = self._loop.time() + IDLE_SECONDS

    # ------------------------------------------------------------ requests

    def _begin(self, request: Request, keep: bool) -> None:
        self._at_work, self._keep = request, keep
        self.deadline = float("inf")
        request.on_want(self._body_wanted)
        self._listener.tasks.add(self._loop.create_task(self._work(request)))

    async def _work(self, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._listener.answer(request, self)
        except ConnectionError:
            pass  # the client has gone
        except BaseException:
            self.abort()  # part of a response may have been sent
            raise
        finally:
            self._at_work = None
            self._listener.tasks.discard(task)
        self._next(request)

    def _next(self, request: Request) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if not self._keep or self._listener.stopping:
            self._close()
        elif self._behind:
            self._begin(*self._behind.popleft())
        elif self._complaint:
            self._refuse(400, self._complaint)
        elif self._arriving is request:  # answered before its body was whole: the rest is dropped, in time
            self._arriving = None
            self.deadline = self._loop.time() + HEAD_SECONDS
        else:
            self.deadline = self._loop.time() + (HEAD_SECONDS if self._in_head else IDLE_SECONDS)
        self._pause_or_resume()

    def _body_wanted(self) -> None:
        request = self._at_work
        if request is not None and request.headers.get("expect", "").lower() == "100-continue":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._pause_or_resume(reading=True)

    def _pause_or_resume(self, *, reading: bool = False) -> None:
        """Stop reading while more was received than a handler has asked for."""
        if self._transport is None or self._transport.is_closing():
            return
        arriving = self._arriving
        waits = arriving is not None and not arriving.wanted and arriving.buffered() > _AHEAD
        pause = not reading and (waits or len(self._behind) > _PIPELINED)
        if pause and not self._paused:
            self._transport.pause_reading()
        elif not pause and self._paused:
            self._transport.resume_reading()
        self._paused = pause

    # ------------------------------------------------------------ responses

    async def send(self, request: Request, response: Response) -> None:
        """Send the response to the request at work."""
        if isinstance(response, Stream):
            await self._send_stream(request, response)
            return
        body = b"" if response.status in NO_BODY else response.body
        head = self._head_of(response, None if response.status in NO_BODY else len(body))
        if request.method == "HEAD" or not body:
            self._write(head)
        elif len(body) <= _ONE_WRITE:
            self._write(head + body)
        else:
            self._write(head)
            self._write(body)
        if self._room is not None:
            await self._drained(Stream.stalled)

    async def _send_stream(self, request: Request, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        chunked = "content-length" not in stream.headers and self._parser.get_http_version() != "1.0"
        if "content-length" not in stream.headers and not chunked:
            self._keep = False  # the end of the connection is the end of the body
        if chunked:
            stream.headers["transfer-encoding"] = "chunked"
        silent = request.method == "HEAD"

        async def send(data: bytes) -> None:
            if self._transport is None:
                raise ConnectionResetError("the client has gone")
            if data and not silent:
                self._write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            if self._room is not None:
                await self._drained(stream.stalled)

        forget = request.when_lost(task.cancel)
        try:
            self._write(self._head_of(stream, None))
            await stream.write(send)
            if chunked and not silent:
                self._write(b"0\r\n\r\n")
        except asyncio.CancelledError:
            if not request.lost:
                raise
            task.uncancel()
        except ConnectionError:
            self.abort()
        except Exception as error:
            # The reader must see at once that this is not the end of the body.
            log.warning("%s: an answer broke off: %s", self._listener.name, error, exc_info=error)
            self.abort()
        finally:
            forget()

    def _head_of(self, response: Response, length: int | None) -> bytes:
        lines = [_STATUS_LINES.get(response.status) or f"HTTP/1.1 {response.status} \r\n", _date(int(time.time()))]
        lines += [f"{name}: {value}\r\n" for name, value in response.headers.items()]
        if length is not None:
            lines.append(f"content-length: {length}\r\n")
        if not self._keep or self._listener.stopping:
            lines.append("connection: close\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1")

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def _drained(self, seconds: float) -> None:
        """Wait until the client keeps up; hang up on one that takes nothing for `seconds`."""
        while (room := self._room) is not None and self._transport is not None:
            before = self._transport.get_write_buffer_size()
            await asyncio.wait({room}, timeout=seconds)
            transport = self._transport
            if not room.done() and transport is not None and transport.get_write_buffer_size() >= before:
                log.warning(
                    "%s: a client has read nothing for %.1f s and is disconnected", self._listener.name, seconds
                )
                transport.abort()
                raise ConnectionResetError("the client reads nothing")

    # ------------------------------------------------------------ ends

    def close_when_idle(self) -> None:
        if self._at_work is None:
            self._close()

    def abort(self) -> None:
        """Hang up, whatever the client has not read."""
        if self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        """Hang up once the client has read what was sent, for which it has `HEAD_SECONDS`."""
        if self._transport is not None:
            self._transport.close()
            self.deadline = self._loop.time() + HEAD_SECONDS

    def _complain(self, message: str) -> None:
        """Answer invalid HTTP with a 400, once the requests before it are answered."""
        self._deaf = True
        if self._arriving is not None and self._arriving is self._at_work:
            self._keep = False
        else:
            self._complaint = message
        if self._arriving is not None:
            self._arriving.end(message)
            self._arriving = None
        if self._at_work is None:
            self._refuse(400, message)

    def _refuse(self, status: int, message: str, headers: str = "") -> None:
        body = message.encode("utf-8", "replace")
        head = f"{_STATUS_LINES[status]}{headers}connection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self._write(f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        self._close()


@lru_cache(1)
def _date(second: int) -> str:
    """Return the line of the `date` header, made once a second."""
    return f"date: {formatdate(second, usegmt=True)}\r\n"
