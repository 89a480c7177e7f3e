"""A weight source with an event loop and a thread of its own.

An engine on a CPU computes in its process's event loop, and whoever shares that loop gets a turn once a token: over a
long link, where a transfer is many small steps, it would take many times as long as the link does. And threads that
hang in a store which does not answer are none of those that the process needs for anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rillflow.weights.manifest import Line, VersionManifest
from rillflow.weights.source import WeightSource
from rillflow.wire import LoopThread

T = TypeVar("T")


class _Loop(LoopThread):
    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Who is cancelled cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class ApartSource:
    """`source`, which nobody else may use. The thread ends with `close`."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._loop = _Loop("weights")

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        return await self._loop.call(self._source.line(known, wait))

    async def manifest(self, version: int) -> VersionManifest:
        return await self._loop.call(self._source.manifest(version))

    async def file(self, version: int, name: str) -> Path:
        return await self._loop.call(self._source.file(version, name))

    async def forget(self, version: int) -> None:
        await self._loop.call(self._source.forget(version))

    async def close(self) -> None:
        try:
            await self._loop.call(self._source.close())
        finally:
            await asyncio.to_thread(self._loop.close)
