"""The client base. Every call has a deadline; failures that may pass are retried until then, and never after it.

A call is retried when the peer could not be reached, cut the connection or answered 503. This is safe because every
body that changes state carries an attempt id, which the receiver takes once, or has no further effect when it comes
twice; the declaration of its route says why (`types.routes`).
"""

from __future__ import annotations

import asyncio
import random
from typing import Generic, Protocol, TypeVar

import msgspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DeadlineExceeded, DiskFault, ErrorBody, Unavailable, WireError, from_body
from rillflow.types.base import msgpack_decoder
from rillflow.types.routes import Route
from rillflow.wire.connections import Answer, Connections

Body = TypeVar("Body")
Reply = TypeVar("Reply")

DEFAULT_DEADLINE = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Client:
    """Calls one service at `url` with a token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        peer: str = "service",
        clock: Clock | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.peer = peer
        self._token = token
        self._clock = clock or SystemClock()
        self._jitter = jitter or random.Random()
        self._connections: Connections | None = None

    async def call(self, route: Route[Body, Reply], body: Body, deadline: float = DEFAULT_DEADLINE) -> Reply:
        """Return the reply of a route to a body (None for a route without one). A long poll's wait is added to the
        deadline."""
        if route.waits:
            deadline += getattr(body, "wait", 0.0)
        return await self._call(route, msgspec.msgpack.encode(body) if route.has_body else b"", deadline)

    async def close(self) -> None:
        """Close the connections. Calls in progress fail."""
        if self._connections is not None:
            self._connections.close()
            self._connections = None
            await asyncio.sleep(0)  # the event loop closes the sockets in its next iteration

    async def _call(self, route: Route[Body, Reply], data: bytes, deadline: float) -> Reply:
        end = self._clock.monotonic() + deadline
        pause = _FIRST_PAUSE
        while True:
            left = end - self._clock.monotonic()
            try:
                return await self._once(route, data, max(left, 0.001))
            except (Unavailable, DiskFault) as error:
                if end - self._clock.monotonic() <= pause:
                    raise DeadlineExceeded(
                        f"{self.peer} did not answer {route.path} within {deadline:.0f} s: {error.message}",
                        f"look at the log of {self.peer}; is it still running?",
                    ) from error
            await asyncio.sleep(pause * (0.5 + self._jitter.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _once(self, route: Route[Body, Reply], data: bytes, left: float) -> Reply:
        """Make one attempt with a body that is encoded already."""
        answer = await self._asked(route.method, route.path, data, left)
        if answer.status != 200:
            raise self._error(route.path, answer)
        try:
            return msgpack_decoder(route.reply).decode(answer.body)
        except msgspec.MsgspecError as error:
            raise WireError(
                f"{self.peer} answered {route.path} with something else than a {route.reply.__name__}: {error}"
            ) from error

    async def _asked(
        self, method: str, path: str, data: bytes, left: float, headers: dict[str, str] | None = None
    ) -> Answer:
        """Return the peer's answer, whatever its status."""
        if self._connections is None:
            self._connections = Connections(self.url, {"authorization": f"Bearer {self._token}"})
        try:
            return await self._connections.call(method, path, data, left, headers)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # our deadline; the network sets an errno
                raise DeadlineExceeded(
                    f"{self.peer} did not answer {path} in time", f"look at the log of {self.peer}"
                ) from error
            raise Unavailable(f"cannot reach {self.peer}: {type(error).__name__}: {error}") from error

    def _error(self, path: str, answer: Answer) -> Exception:
        try:
            return from_body(msgpack_decoder(ErrorBody).decode(answer.body))
        except msgspec.MsgspecError:
            return WireError(f"{self.peer} answered {path} with status {answer.status}")


class HasWire(Protocol):
    """A client class whose methods call the routes of one service."""

    wire: Client


class Sends(Generic[Body, Reply]):
    """A method of a client class: `fail = Sends(Dataflow.fail)` is called as `await client.fail(body, deadline)`."""

    def __init__(self, route: Route[Body, Reply]) -> None:
        self.route = route

    def __get__(self, client: HasWire, owner: type) -> _Sending[Body, Reply]:
        return _Sending(client.wire, self.route)


class Reads(Generic[Reply]):
    """The same for a route without a body: `status = Reads(Dataflow.status)`."""

    def __init__(self, route: Route[None, Reply]) -> None:
        self.route = route

    def __get__(self, client: HasWire, owner: type) -> _Reading[Reply]:
        return _Reading(client.wire, self.route)


class _Sending(Generic[Body, Reply]):
    def __init__(self, wire: Client, route: Route[Body, Reply]) -> None:
        self._wire, self._route = wire, route

    async def __call__(self, body: Body, deadline: float = DEFAULT_DEADLINE) -> Reply:
        return await self._wire.call(self._route, body, deadline)


class _Reading(Generic[Reply]):
    def __init__(self, wire: Client, route: Route[None, Reply]) -> None:
        self._wire, self._route = wire, route

    async def __call__(self, deadline: float = DEFAULT_DEADLINE) -> Reply:
        return await self._wire.call(self._route, None, deadline)
