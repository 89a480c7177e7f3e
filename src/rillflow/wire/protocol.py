"""HTTP/1.1 with bounds on what comes before and between requests, where uvicorn has none.

A connection has a bounded head, brings it within a deadline, is closed when it idles, and counts against a bound on
their number. None of that asks who is at the other end: it holds for those without a key too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_LIMIT = 64 << 10  # bytes of the request line and all headers; tokens and paths are far shorter
HEAD_SECONDS = 10.0  # from a connection's beginning, or a head's first byte, to its end
IDLE_SECONDS = 75  # between requests: longer than clients keep their pooled connections
CONNECTIONS = 16384  # of one service

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 20\r\n\r\nToo many connections"
)


class Link:
    """Whether the client of a request is still connected. `on_lost` is called once, when it is not."""

    def __init__(self) -> None:
        self._lost = False
        self.on_lost: Callable[[], object] = lambda: None

    def is_lost(self) -> bool:
        return self._lost

    def lose(self) -> None:
        if not self._lost:
            self._lost = True
            self.on_lost()


class BoundedHttp(HttpToolsProtocol):
    """Answers what passes a bound where HTTP has an answer, and hangs up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head = 0
        self._late: asyncio.TimerHandle | None = None
        self._at_work: RequestResponseCycle | None = None

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.write(_FULL)
            transport.close()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_head()
        # With pipelining, what is at work is not the request that came last, which alone uvicorn would tell.
        if self._at_work is not None and not self._at_work.response_complete:
            self._at_work.disconnected = True
            self._at_work.message_event.set()
            cast("Link", self._at_work.scope["extensions"]["rillflow"]["link"]).lose()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._at_work = cycle
        super()._start_asgi_task(cycle, app)

    # ------------------------------------------------------------ bytes

    def data_received(self, data: bytes) -> None:
        # The first piece may begin with the end of an earlier body and is not counted: it is bounded by the socket.
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head > HEAD_LIMIT:
            self.send_400_response(f"The head of a request has at most {HEAD_LIMIT} bytes.")
        elif self.cycle is None or self.cycle.response_complete:
            # Part of a head, blank lines, or the rest of a body that was refused: it has ended soon, or is ended.
            self._expect_head()

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()
        # Closing waits for a client to read what was sent: `hang_up` is for one that does not.
        self.scope["extensions"] = {"rillflow": {"hang_up": self.transport.abort, "link": Link()}}

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect_no_head()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_LIMIT:
            raise ValueError("the head is too long")  # the parser hands it on as an invalid request
        super().on_headers_complete()

    # ------------------------------------------------------------ time

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        # Not `close`, which would wait for ever for a client that does not read what was sent.
        self.transport.abort()

    def _expect_no_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
