"""Fetches one file by several concurrent ranges, from any server that has it. It can be read while it arrives.

Invariants: a received byte is not fetched again, even after the process was killed, unless the whole file was wrong; a
stream that is cut, stalls or is too slow continues from its place, on another server if necessary; if no stream makes
progress for `patience` seconds the download fails, and received bytes stay. Servers that sent wrong bytes, or do not
have the file, are not asked for it again.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import CorruptData, RillflowError, Unauthorized, Unavailable, WireError
from rillflow.weights.transport.cache import PartFile, Span
from rillflow.weights.transport.mirrors import STALL_SECONDS, Mirrors, NotThere
from rillflow.wire import in_thread

PATIENCE = 120.0
LEAST_PIECE, LARGE_PIECE = 256 << 10, 8 << 20
LEAST_BYTES = 16 << 10  # that a stream must receive within the stall time
_BUFFER = 256 << 10
_BUFFER_SECONDS = 0.2
_NOTE_SECONDS = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


def piece_size(size: int, left: int, streams: int, most: int) -> int:
    """Return the bytes that one stream takes at a time, of `left` bytes of `size`.

    Pieces are large at first, because each costs a round trip, and small at the end, so that all streams end together.
    """
    least = min(max(-(-size // streams), LEAST_PIECE), LARGE_PIECE)
    return min(max(least, left // (2 * streams)), most)


class Download:
    """The download of one file into `part`. `run` it once; readers may `wait_for` bytes meanwhile."""

    def __init__(
        self,
        part: PartFile,
        mirrors: Mirrors,
        path: str,
        *,
        streams: int = 4,
        most_piece: int = 1 << 40,
        patience: float = PATIENCE,
        stall: float = STALL_SECONDS,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self._part = part
        self._mirrors = mirrors
        self._path = path
        self._streams = streams
        self._most_piece = most_piece
        self._patience = patience
        self._stall = stall
        self._clock = clock or SystemClock()
        self._jitter = jitter or random.Random()
        self._todo: list[Span] = []
        self._wanted: list[int] = []  # where readers wait
        self._refused: dict[str, RillflowError] = {}
        self._givers: set[str] = set()
        self._only: str | None = None
        self._resumed = False
        self._got_on = self._noted = 0.0
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self.bytes = 0
        self.retries = 0

    @property
    def givers(self) -> list[str]:
        return sorted(self._givers)

    # ------------------------------------------------------------ the whole

    async def run(self) -> Path:
        """Fetch and verify the file; return its path."""
        try:
            while True:
                self._resumed = len(self._part.have) > 0
                await self._fetch_all()
                try:
                    return await in_thread(self._part.finish)
                except CorruptData as error:
                    self._blame(error)
                    self._part.restart()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._tell()

    def _blame(self, error: CorruptData) -> None:
        """Find the server that sent wrong bytes. With several servers, one is asked alone next. Bytes of an earlier
        process may have been lost, so no server is blamed for them."""
        givers, self._givers = self._givers, set()
        if self._resumed:
            return
        if not givers:
            raise error
        if len(givers) > 1:
            self._only = min(givers)
            return
        self._only = None
        for url in givers:
            self._refused[url] = error
            self._mirrors.lied(url, error)

    async def _fetch_all(self) -> None:
        self._todo = self._part.have.missing(self._part.facts.size)
        self._got_on = self._clock.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._streams):
                    group.create_task(self._stream(), name=f"download-{number}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await in_thread(self._part.note)

    # ------------------------------------------------------------ one stream

    async def _stream(self) -> None:
        pause = _FIRST_PAUSE
        while (piece := self._take()) is not None:
            url = await self._choose()
            before = self.bytes
            try:
                await self._fetch(url, *piece)
                pause = _FIRST_PAUSE
                self._mirrors.answered(url)
            except (NotThere, Unauthorized) as error:
                self._refused[url] = error
            except WireError as error:
                self.retries += 1
                self._mirrors.failed(url, error)
                if not isinstance(error, Unavailable):
                    self._refused[url] = error
                if self._clock.monotonic() - self._got_on > self._patience:
                    raise Unavailable(
                        f"received no bytes of {self._path} for {self._patience:.0f} s: {error.message}",
                        "check the link and the weight server; received bytes are kept",
                    ) from error
                pause = _FIRST_PAUSE if self.bytes - before >= LEAST_BYTES else pause
                await asyncio.sleep(pause * (0.5 + self._jitter.random()))
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _choose(self) -> str:
        if self._only is not None and self._only not in self._refused:
            return self._only
        order = await self._mirrors.order(without=self._refused)
        if not order:
            raise next(iter(self._refused.values()))
        return order[0]

    def _take(self) -> Span | None:
        """Take a piece that no stream fetches yet: one that a reader waits for, else the first."""
        if not self._todo:
            return None
        left = sum(end - start for start, end in self._todo)
        size = piece_size(self._part.facts.size, left, self._streams, self._most_piece)
        places = [(n, at) for at in self._wanted for n, (start, end) in enumerate(self._todo) if start <= at < end]
        n, at = places[0] if places else (0, self._todo[0][0])
        start, end = self._todo[n]
        taken = (at, min(at + size, end))
        self._todo[n : n + 1] = [span for span in ((start, at), (taken[1], end)) if span[0] < span[1]]
        return taken

    async def _fetch(self, url: str, start: int, end: int) -> None:
        """Fetch one piece; the part that does not arrive is returned to the queue."""
        size = self._part.facts.size
        buffer = bytearray()
        window, brought, flushed = self._clock.monotonic(), 0, self._clock.monotonic()
        try:
            async with aclosing(self._mirrors.blocks(url, self._path, start, end, size)) as blocks:
                async for data in blocks:
                    buffer += data
                    brought += len(data)
                    now = self._clock.monotonic()
                    if len(buffer) >= _BUFFER or now - flushed >= _BUFFER_SECONDS:
                        start, flushed = await self._keep(url, start, buffer), now
                    if brought >= LEAST_BYTES:
                        self._got_on = window = now
                        brought = 0
                    elif now - window > self._stall:
                        raise Unavailable(f"{url} is too slow: {brought} bytes in {self._stall:.0f} s")
            self._got_on = self._clock.monotonic()
        finally:
            # Not in a thread: this must also run when the task is cancelled.
            if buffer:
                self._part.write(start, bytes(buffer))
                start = self._has(url, start, len(buffer))
            if start < end:
                self._todo = sorted([*self._todo, (start, end)])

    async def _keep(self, url: str, start: int, buffer: bytearray) -> int:
        data = bytes(buffer)
        # Runs to its end, also when cancelled: the file is closed then, and its descriptor may soon be reused.
        await in_thread(lambda: self._part.write(start, data))
        buffer.clear()
        end = self._has(url, start, len(data))
        now = self._clock.monotonic()
        if now - self._noted > _NOTE_SECONDS:
            self._noted = now
            await in_thread(self._part.note)
        return end

    def _has(self, url: str, start: int, size: int) -> int:
        self._part.have.add(start, start + size)
        self._givers.add(url)
        self.bytes += size
        self._tell()
        return start + size

    # ------------------------------------------------------------ readers

    async def wait_for(self, start: int) -> int:
        """Wait for bytes from `start` on; return the end of those that have arrived. Unavailable if the download
        fails."""
        self._wanted.append(start)
        try:
            while (reach := self._part.have.reach(start)) == start:
                if self._failure is not None:
                    raise Unavailable(f"the download of {self._path} failed: {self._failure}")
                await self._news.wait()
        finally:
            self._wanted.remove(start)
        return reach

    def _tell(self) -> None:
        """Wake all waiting readers; later ones wait for a new event."""
        self._news.set()
        self._news = asyncio.Event()
