"""The client base. Every call has a deadline; what can be retried is retried until then, nothing is after it.

A call is retried when the peer could not be reached, cut the connection or said 503. That is safe because every
body that changes something carries an attempt id, which the receiver takes once (see `types`).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, TypeVar

import aiohttp
import msgspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DeadlineExceeded, ErrorBody, Unavailable, WireError, from_body

Reply = TypeVar("Reply")

DEFAULT_DEADLINE = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Client:
    """Calls one service at `url` with the run's token."""

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
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Any, reply: type[Reply], deadline: float = DEFAULT_DEADLINE) -> Reply:
        return await self._call("POST", path, msgspec.msgpack.encode(body), reply, deadline)

    async def get(self, path: str, reply: type[Reply], deadline: float = DEFAULT_DEADLINE) -> Reply:
        return await self._call("GET", path, b"", reply, deadline)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, data: bytes, reply: type[Reply], deadline: float) -> Reply:
        end = self._clock.monotonic() + deadline
        pause = _FIRST_PAUSE
        while True:
            left = end - self._clock.monotonic()
            try:
                return await self._once(method, path, data, reply, max(left, 0.001))
            except Unavailable as error:
                if end - self._clock.monotonic() <= pause:
                    raise DeadlineExceeded(
                        f"{self.peer} did not answer {path} within {deadline:.0f} s: {error.message}",
                        f"look at the log of {self.peer}; is it still running?",
                    ) from error
            await asyncio.sleep(pause * (0.5 + self._jitter.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _once(self, method: str, path: str, data: bytes, reply: type[Reply], left: float) -> Reply:
        session = self._open()
        try:
            async with session.request(
                method, self.url + path, data=data, timeout=aiohttp.ClientTimeout(total=left)
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"cannot reach {self.peer}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.peer} did not answer {path} in time", f"look at the log of {self.peer}"
            ) from error
        if response.status != 200:
            raise self._error(path, response.status, body)
        try:
            return msgspec.msgpack.decode(body, type=reply)
        except msgspec.MsgspecError as error:
            raise WireError(
                f"{self.peer} answered {path} with something else than a {reply.__name__}: {error}"
            ) from error

    def _error(self, path: str, status: int, body: bytes) -> Exception:
        try:
            return from_body(msgspec.msgpack.decode(body, type=ErrorBody))
        except msgspec.MsgspecError:
            return WireError(f"{self.peer} answered {path} with status {status}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"authorization": f"Bearer {self._token}"},
                connector=aiohttp.TCPConnector(limit=256),
            )
        return self._session
