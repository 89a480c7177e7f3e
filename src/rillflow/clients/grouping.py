"""Puts of one unit: those that arrive while one is written share the next write, and its sync."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import TYPE_CHECKING

from rillflow.batching import Batcher
from rillflow.clients.columns import check_rows
from rillflow.errors import RillflowError, StorageError, Unavailable
from rillflow.types import Row

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

    Rows = Sequence[Mapping[str, Buffer]]

WAITING_BYTES = 256 << 20
# The bytes of one group, unless one put alone has more. A disk writes as much in the time of a sync. A larger group
# would keep callers waiting that could go on after a smaller one.
_GROUP_BYTES = 2 << 20


class GroupedPuts:
    """Runs `put` in a thread of its own, for all who wait at once. Bad rows are refused before they join a group.

    Belongs to one event loop. A caller that stops waiting may leave rows behind that have no reference.
    """

    def __init__(self, put: Callable[[Rows], list[Row]], *, limit: int = WAITING_BYTES) -> None:
        self._put = put
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "puts")
        self._batcher = Batcher["Rows", list[Row]](self._write, most_size=_GROUP_BYTES)

    @property
    def bytes(self) -> int:
        """Bytes of puts that are not acknowledged yet."""
        return self._batcher.size

    async def put(self, rows: Rows) -> list[Row]:
        """Return where the rows are, once they are acknowledged; Unavailable when too much waits already."""
        return await self.put_checked(rows, check_rows(rows))

    async def put_checked(self, rows: Rows, size: int) -> list[Row]:
        """Put rows that were checked before and have `size` bytes."""
        if self.bytes and self.bytes + size > self._limit:
            raise Unavailable(f"{self.bytes} bytes wait to be written already", "the disk is slow: come back later")
        return await self._batcher.submit(rows, size)

    async def close(self) -> None:
        """Write the waiting rows; later ones are refused."""
        await self._batcher.close(finish=True)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _write(self, puts: list[Rows]) -> list[list[Row]]:
        rows = list(chain.from_iterable(puts))
        try:
            places = iter(await asyncio.get_running_loop().run_in_executor(self._thread, self._put, rows))
        except RillflowError:
            raise
        except Exception as error:
            raise StorageError(f"a put failed: {type(error).__name__}: {error}", "see the log") from error
        return [list(islice(places, len(one))) for one in puts]
