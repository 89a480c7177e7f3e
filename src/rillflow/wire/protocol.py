"""HTTP/1.1 with a bound on what comes before a body: uvicorn's own parser would collect a header of any size."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT = 64 << 10  # bytes of the request line and all headers; tokens and paths are far shorter


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and hangs up once a head passes the limit, before anyone was asked who it comes from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head = 0

    def data_received(self, data: bytes) -> None:
        # The first piece may begin with the end of an earlier body and is not counted: it is bounded by the socket.
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        if self._in_head and self._head > HEAD_LIMIT and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {HEAD_LIMIT} bytes.")

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_LIMIT:
            raise ValueError("the head is too long")  # the parser hands it on as an invalid request
        super().on_headers_complete()
