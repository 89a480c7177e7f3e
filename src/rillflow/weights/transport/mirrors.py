"""Several servers of the same weights: the nearest one that answers is asked, the others if it fails.

Invariants: every request has a deadline or a minimum rate; a server that failed is avoided for a while, longer each
time, and asked again if no other is left. Answers are not trusted: the caller verifies them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import (
    CorruptData,
    ErrorBody,
    RillflowError,
    Unauthorized,
    Unavailable,
    WeightsError,
    WireError,
    from_body,
)
from rillflow.types.base import msgpack_decoder

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_SECONDS = 10.0
STALL_SECONDS = 15.0  # a connection without bytes for this long is closed
GET_SECONDS = 30.0
_PROBE_SECONDS = 5.0
_KEPT_SECONDS = 60.0  # for which an unused connection is kept: a new one costs a round trip
_PAUSE = 0.2
_FIRST_REST, _LONGEST_REST = 1.0, 60.0
_SMALL = 64 << 20  # most bytes of a line or a manifest
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class NotThere(WeightsError):
    """The server answers but does not have the file."""


class Answer(msgspec.Struct, frozen=True):
    """A small answer; `data` is empty with status 304."""

    status: int
    data: bytes
    tag: str
    url: str


@dataclass(slots=True, eq=False)
class _Mirror:
    url: str
    seconds: float = 0.0
    failures: int = 0
    rests_until: float = 0.0


class Mirrors:
    """The servers, used from one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        *,
        clock: Clock | None = None,
        stall: float = STALL_SECONDS,
    ) -> None:
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise WeightsError(
                f"{', '.join(urls)!r} is not a list of URLs", "give http://HOST:PORT, several separated by commas"
            )
        self._mirrors = [_Mirror(url.rstrip("/")) for url in urls]
        self._token = token
        self._clock = clock or SystemClock()
        self._stall = stall
        self._session: aiohttp.ClientSession | None = None
        self._probing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ the order of servers

    async def order(self, without: Collection[str] = ()) -> list[str]:
        """Return the servers to ask, the best first; avoided ones come last."""
        if len(self._mirrors) > 1:
            if self._probing is None:
                self._probing = asyncio.create_task(self._probe())
            await asyncio.shield(self._probing)
        now = self._clock.monotonic()
        ranked = sorted(self._mirrors, key=lambda one: (max(0.0, one.rests_until - now), one.seconds))
        return [one.url for one in ranked if one.url not in without]

    async def _probe(self) -> None:
        """Measure each server's distance by the time of a small answer."""

        async def ask(mirror: _Mirror) -> None:
            begun = self._clock.monotonic()
            try:
                await self._get(mirror.url, "/health", _PROBE_SECONDS)
                mirror.seconds = self._clock.monotonic() - begun
            except RillflowError as error:
                self.failed(mirror.url, error)
                mirror.seconds = _PROBE_SECONDS

        await asyncio.gather(*(ask(mirror) for mirror in self._mirrors))

    def _find(self, url: str) -> _Mirror:
        return next(mirror for mirror in self._mirrors if mirror.url == url)

    def failed(self, url: str, why: RillflowError) -> None:
        mirror = self._find(url)
        if not mirror.failures:
            log.warning("%s: %s", url, why.message)
        rest = min(_FIRST_REST * 2**mirror.failures, _LONGEST_REST)
        mirror.failures = min(mirror.failures + 1, 10)
        mirror.rests_until = self._clock.monotonic() + rest

    def lied(self, url: str, why: RillflowError) -> None:
        log.error("%s: %s", url, why.message)
        mirror = self._find(url)
        mirror.failures, mirror.rests_until = 10, self._clock.monotonic() + _LONGEST_REST

    def answered(self, url: str) -> None:
        mirror = self._find(url)
        if mirror.failures and mirror.rests_until <= self._clock.monotonic():
            log.info("%s answers again", url)
        mirror.failures, mirror.rests_until = 0, 0.0

    # ------------------------------------------------------------ asking

    async def get(self, path: str, wait: float = 0.0) -> Answer:
        """Return a small answer of the first server that gives one; NotThere if no server that answers has it."""
        try:
            return await self._get_of_any(path, wait)
        except Unavailable:  # connections over long links are cut now and then
            await asyncio.sleep(_PAUSE)
            return await self._get_of_any(path, wait)

    async def _get_of_any(self, path: str, wait: float) -> Answer:
        missing: NotThere | None = None
        last: RillflowError = Unavailable("no server is left to ask")
        for url in await self.order():
            try:
                answer = await self._get(url, path, GET_SECONDS + wait)
                self.answered(url)
                return answer
            except NotThere as error:
                self.answered(url)
                missing = error
            except Unauthorized:
                raise
            except WireError as error:
                self.failed(url, error)
                last = error
        raise missing or last

    async def _get(self, url: str, path: str, seconds: float) -> Answer:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._open().get(url + path, timeout=timeout, allow_redirects=False) as response:
                data = await response.content.read(_SMALL + 1)
                while not response.content.at_eof() and len(data) <= _SMALL:
                    data += await response.content.read(_SMALL)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _unreachable(url, error) from error
        if len(data) > _SMALL:
            raise WireError(f"{url} answers {path} with more than {_SMALL} bytes", "is this a weight server?")
        if response.status not in (200, 304):
            raise _refusal(url, path, response.status, data)
        return Answer(response.status, data, response.headers.get("etag", "").strip('"'), url)

    def read(self, answer: Answer, parse: Callable[[bytes, str], T]) -> T:
        """Parse an answer. A server that sent a damaged one is avoided for a while."""
        try:
            return parse(answer.data, f"the answer of {answer.url}")
        except CorruptData as error:
            self.lied(answer.url, error)
            raise

    async def blocks(self, url: str, path: str, start: int, end: int, size: int) -> AsyncGenerator[bytes]:
        """Yield the bytes [start, end) of a file of `size` bytes as they arrive; raise an error if they stop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._stall)
        asked = {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
        left = end - start
        try:
            async with self._open().get(url + path, headers=asked, timeout=timeout, allow_redirects=False) as response:
                if response.status != 206:
                    raise _refusal(url, path, response.status, await response.content.read(1 << 16))
                _check_range(url, path, response.headers.get("content-range", ""), (start, end - 1, size))
                while left and (data := await response.content.readany()):
                    yield data[:left]
                    left -= min(left, len(data))
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _unreachable(url, error) from error
        if left:
            raise Unavailable(f"{url} stopped sending {path}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"authorization": f"Bearer {self._token}"},
                connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=_KEPT_SECONDS),
                read_bufsize=1 << 18,
            )
        return self._session

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None


def _unreachable(url: str, error: BaseException) -> Unavailable:
    return Unavailable(f"cannot reach {url}: {type(error).__name__}: {error}", "is the weight server running?")


def _refusal(url: str, path: str, status: int, data: bytes) -> RillflowError:
    """Return the error of a status: 404, 401, 403 and 416 are permanent, all others may pass."""
    try:
        told = from_body(msgpack_decoder(ErrorBody).decode(data)).message
    except msgspec.MsgspecError:
        told = "without a reason"
    if status == 404:
        return NotThere(f"{url} has no {path}: {told}", "look at the line again")
    if status in (401, 403):
        return Unauthorized(f"{url} refuses the token", "use the token of the run that it serves")
    if status == 416:
        return WireError(f"{url} does not have these bytes of {path}: {told}", "it serves another file")
    return Unavailable(f"{url} answered {path} with status {status}: {told}")


def _check_range(url: str, path: str, told: str, asked: tuple[int, int, int]) -> None:
    found = _RANGE.fullmatch(told)
    if found is None or (int(found[1]), int(found[2]), int(found[3])) != asked:
        raise WireError(f"{url} answered {path} with {told[:80]!r} instead of {asked}", "it serves another file")
