"""Group commit: puts that arrive while one is being made durable share the next sync."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.clients.columns import check_rows
from rillflow.errors import RillflowError, StorageError, Unavailable
from rillflow.types import Row

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

    Rows = Sequence[Mapping[str, Buffer]]

WAITING_BYTES = 256 << 20
# Written by one put, unless one alone has more. As much as any disk takes in the time of a sync, and no more: who is
# told of the first group goes on while the next one is written.
_GROUP_BYTES = 2 << 20


@dataclass(frozen=True)
class _Waiting:
    rows: Rows
    size: int
    done: asyncio.Future[list[Row]]


class GroupedPuts:
    """Runs `put` in a thread of its own, for all who wait at once. Bad rows are refused before they join a group.

    Belongs to one event loop. Who stops waiting leaves rows behind that nobody refers to; nobody else notices.
    """

    def __init__(self, put: Callable[[Rows], list[Row]], *, limit: int = WAITING_BYTES) -> None:
        self._put = put
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "puts")
        self._waiting: list[_Waiting] = []
        self._draining: asyncio.Task[None] | None = None
        self._closed = False
        self.bytes = 0  # of puts that are not durable yet

    async def put(self, rows: Rows) -> list[Row]:
        """Where the rows are, once they are durable; Unavailable when too much waits already."""
        return await self.put_checked(rows, check_rows(rows))

    async def put_checked(self, rows: Rows, size: int) -> list[Row]:
        """The same for rows that were checked before, and have so many bytes."""
        if self._closed:
            raise Unavailable("the unit is closing", "use another unit")
        if self.bytes and self.bytes + size > self._limit:
            raise Unavailable(f"{self.bytes} bytes wait to be written already", "the disk is slow: come back later")
        mine = _Waiting(rows, size, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self.bytes += size
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="puts")
        return await mine.done

    async def close(self) -> None:
        """What waits is still written; what comes later is refused."""
        self._closed = True
        if self._draining is not None:
            await asyncio.wait([self._draining])  # which goes on should the caller be cancelled
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while group := self._next_group():
                rows = [row for one in group for row in one.rows]
                try:
                    _answer(group, await loop.run_in_executor(self._thread, self._put, rows))
                except Exception as error:
                    _refuse(group, error)
                self.bytes -= sum(one.size for one in group)
        finally:
            self._draining = None

    def _next_group(self) -> list[_Waiting]:
        size = count = 0
        for one in self._waiting:
            if count and size + one.size > _GROUP_BYTES:
                break
            size, count = size + one.size, count + 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group


def _answer(group: list[_Waiting], places: list[Row]) -> None:
    at = 0
    for one in group:
        if not one.done.done():
            one.done.set_result(places[at : at + len(one.rows)])
        at += len(one.rows)


def _refuse(group: list[_Waiting], error: Exception) -> None:
    """Everybody gets an error of their own: one that is raised twice would collect both tracebacks."""
    for one in group:
        if not one.done.done():
            if isinstance(error, RillflowError):
                one.done.set_exception(type(error)(error.message, error.hint))
            else:
                one.done.set_exception(StorageError(f"a put failed: {type(error).__name__}: {error}", "see the log"))
