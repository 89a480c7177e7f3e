"""Requests and responses as handlers of a service see them. `wire.protocol` reads and writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import parse_qs

from rillflow.errors import BadRequest
from rillflow.types import TokenScope

T = TypeVar("T")
Send = Callable[[bytes], Awaitable[None]]

BODY_SECONDS = 60.0
NO_BODY = (204, 304)  # statuses of responses without a body


def refused(status: int, message: str, hint: str) -> BadRequest:
    """Return a BadRequest with another status than 400."""
    error = BadRequest(message, hint)
    error.status = status
    return error


class Response:
    """A status, headers and a body that is whole."""

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str = "",
    ) -> None:
        self.body = body
        self.status = status
        self.headers = dict(headers) if headers else {}
        if media_type:
            self.headers["content-type"] = media_type


class Stream(Response):
    """A response whose body is made while it is sent. Without a `content-length` it goes out in chunks.

    `write` is always called once, so it may own the response's resources. It is cancelled when the client
    disconnects. Each `send` returns once the client keeps up; a client that takes nothing for `stalled` seconds is
    disconnected.
    """

    stalled = 30.0

    async def write(self, send: Send) -> None:
        raise NotImplementedError


class Request:
    """One request. Names of headers are in lower case; `params` has what the open segments of its path took.

    `scope` is that of its token; None for a key that is not one of the run's tokens.
    """

    def __init__(self, method: str, path: str, query: str, headers: dict[str, str]) -> None:
        self.scope: TokenScope | None = None
        self.method = method
        self.path = path
        self.headers = headers
        self.params: dict[str, str] = {}
        self._lost = False
        self.wanted = False  # a handler reads the body
        self._query = query
        self._on_lost: list[Callable[[], object]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = False
        self._fault = ""
        self._limit = 0
        self._ready: asyncio.Future[None] | None = None  # once the body is whole, at fault or beyond the limit
        self._want: Callable[[], None] = lambda: None

    @property
    def lost(self) -> bool:
        """True once the client has disconnected."""
        return self._lost

    @property
    def query(self) -> dict[str, list[str]]:
        """The values of the query by name."""
        return parse_qs(self._query, keep_blank_values=True)

    def query_value(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    # ------------------------------------------------------------ the body

    async def read(self, limit: int) -> bytes:
        """Return the whole body; BadRequest as soon as it exceeds the limit, stops coming or loses its sender."""
        declared = self.headers.get("content-length", "")
        if len(declared) > 18 or (declared.isdigit() and int(declared) > limit):
            raise _too_long(limit)
        self.wanted = True
        if not self._whole:
            self._want()
            self._limit = limit
            self._ready = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    if not self._fault and self._size <= limit:
                        await self._ready
            except TimeoutError:
                message = f"the body took longer than {BODY_SECONDS:.0f} s"
                raise refused(408, message, "send it faster, or less") from None
        if self._size > limit:
            raise _too_long(limit)
        if self._fault:
            raise BadRequest(self._fault)
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def buffered(self) -> int:
        """Return how many bytes of the body were received and not dropped."""
        return self._size

    def add(self, part: bytes) -> None:
        """Add a part of the body, as it is received."""
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._limit:
            self._wake()

    def end(self, fault: str = "") -> None:
        """End the body: whole, or with a fault."""
        self._whole, self._fault = not fault, fault
        self._wake()

    def on_want(self, want: Callable[[], None]) -> None:
        """Set the callback for a handler that begins to read a body that is not whole."""
        self._want = want

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    # ------------------------------------------------------------ disconnects

    def when_lost(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once when the client disconnects. Returns a function that cancels this."""
        self._on_lost.append(callback)

        def forget() -> None:
            if callback in self._on_lost:
                self._on_lost.remove(callback)

        return forget

    def lose(self) -> None:
        """Note that the client has disconnected."""
        if self._lost:
            return
        self._lost = True
        if not self._whole and not self._fault:
            self.end("the client has gone before its body was whole")
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            callback()

    async def while_connected(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work()`, which is cancelled when the client disconnects; the error is a 499 then."""
        task = asyncio.current_task()
        assert task is not None, "in the task of a request"
        if self._lost:
            raise _gone()
        forget = self.when_lost(task.cancel)
        try:
            return await work()
        except asyncio.CancelledError:
            if not self.lost:
                raise
            task.uncancel()
            raise _gone() from None
        finally:
            forget()


def _gone() -> BadRequest:
    return refused(499, "the client has gone", "nothing was done for it")


def _too_long(limit: int) -> BadRequest:
    return refused(413, f"the body is larger than {limit} bytes", "send less at once")
