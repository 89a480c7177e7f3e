"""What a caller of an engine iterates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import takewhile

from rillflow.errors import BadRequest, EngineError, EngineLost
from rillflow.types import Chunk


class Stream:
    """The chunks of one request, in order. Closing it, or dropping it, aborts the request. Whoever samples is never
    held up by a slow reader, who finds the waiting tokens merged into one chunk per version."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._chunks: deque[Chunk] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self._done = False

    def push(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """The request ends with this, after what was sampled before."""
        self._error = error
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        while not self._chunks and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._chunks:
            chunk = self._pop()
            self._done = chunk.finish is not None
            return chunk
        self._done = True
        # Each caller gets an error of its own: a shared one would collect all their tracebacks.
        if isinstance(self._error, EngineError | BadRequest):
            raise type(self._error)(self._error.message, self._error.hint) from self._error
        raise EngineLost(f"a step of the engine failed: {self._error!r}", "see its cause") from self._error

    async def aclose(self) -> None:
        self._done = True
        self._chunks.clear()
        self._abort()

    def __del__(self) -> None:
        self._abort()

    def _pop(self) -> Chunk:
        """The waiting tokens of one version as one chunk; a seam is always a chunk's beginning."""
        first = self._chunks.popleft()
        same = [first, *takewhile(lambda chunk: chunk.version == first.version and not chunk.seam, self._chunks)]
        for _ in same[1:]:
            self._chunks.popleft()
        if len(same) == 1:
            return same[0]
        return Chunk(
            tokens=[token for chunk in same for token in chunk.tokens],
            logprobs=[value for chunk in same for value in chunk.logprobs],
            raw_logprobs=[value for chunk in same for value in chunk.raw_logprobs],
            version=first.version,
            finish=same[-1].finish,
            seam=first.seam,
        )
