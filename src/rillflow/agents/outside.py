"""A client for outside agents: separate programs that take their tasks from a running gateway.

    async with Feed(url, token, capacity=8) as feed:
        async for task in feed:              # ends when the run ends
            asyncio.create_task(work(feed, task))

After a restart of the gateway the feed connects again and lists the sessions that are still being played; `end` is sent
again until it is answered. Both give up after `patience` seconds without an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, Unauthorized, Unavailable, WireError
from rillflow.gateway.feed import Ended, EndSession, OutsideTask
from rillflow.types.base import json_decoder

SILENCE = 30.0  # seconds without data after which a feed is dead; the gateway sends a line every five seconds
_PAUSE = 0.25
_ENDED, _GONE = 410, 404


class Feed:
    """The tasks of one gateway. A task is being played from its arrival until `end` was answered."""

    def __init__(
        self, url: str, token: str, *, capacity: int = 1, patience: float = 120.0, clock: Clock | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._capacity = capacity
        self._patience = patience
        self._clock = clock or SystemClock()
        self._playing: set[str] = set()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Feed:
        self._http = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def __aiter__(self) -> AsyncIterator[OutsideTask]:
        """Yield tasks until the run ends; Unavailable if the gateway cannot be reached for too long."""
        heard = self._clock.monotonic()
        while True:
            try:
                async for task in self._connected():
                    heard = self._clock.monotonic()
                    if task is not None:
                        self._playing.add(task.session)
                        yield task
                return
            except (aiohttp.ClientError, TimeoutError, ConnectionError, Unavailable) as error:
                await self._pause(heard, error)

    async def _connected(self) -> AsyncIterator[OutsideTask | None]:
        """Yield the tasks of one connection; None stands for a keep-alive line."""
        assert self._http is not None, "use it as `async with Feed(…) as feed`"
        query = [("capacity", str(self._capacity)), *(("playing", session) for session in sorted(self._playing))]
        async with self._http.get(f"{self._url}/feed", params=query) as response:
            if response.status == _ENDED:
                return
            await _check(response)
            yield None
            async for line in _lines(response.content):
                yield json_decoder(OutsideTask).decode(line) if line.strip() else None

    async def end(
        self,
        task: OutsideTask,
        *,
        reward: float | Mapping[str, float] | None = None,
        answer: Any = None,
        error: str | None = None,
    ) -> Ended:
        """End a task and return when the run has accepted or refused the episode."""
        given = dict(reward) if isinstance(reward, Mapping) else reward
        said = msgspec.json.encode(EndSession(reward=given, answer=answer, error=error))
        begun = self._clock.monotonic()
        while True:
            try:
                ended = await self._end_once(task, said)
                self._playing.discard(task.session)
                return ended
            except (aiohttp.ClientError, TimeoutError, ConnectionError, Unavailable) as failure:
                await self._pause(begun, failure)

    async def _end_once(self, task: OutsideTask, said: bytes) -> Ended:
        assert self._http is not None, "use it as `async with Feed(…) as feed`"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)
        async with self._http.post(f"{task.anthropic_url}/end", data=said, timeout=timeout) as response:
            if response.status == _GONE:  # its deadline has passed, or the run has already accepted it
                return Ended(session=task.session, accepted=False, reason="the session is not open any more")
            await _check(response)
            return json_decoder(Ended).decode(await response.read())

    async def _pause(self, since: float, error: Exception) -> None:
        if self._clock.monotonic() - since > self._patience:
            raise Unavailable(
                f"the gateway at {self._url} did not answer for {self._patience:.0f} s: {error}",
                "check that the run is alive; its logs are in the run folder",
            ) from error
        await asyncio.sleep(_PAUSE)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length; the reader's own are limited by its buffer, and a task may be a whole document."""
    begun: list[bytes] = []
    async for block in content.iter_any():
        first, *others = block.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    said = (await response.text())[:500]
    if response.status == Unauthorized.status:
        raise Unauthorized("the gateway refuses this token", "use the one that `rillflow token RUN node` prints")
    if response.status in (429, Unavailable.status):
        raise Unavailable(said)
    raise (BadRequest if response.status < 500 else WireError)(f"the gateway answered {response.status}: {said}")
