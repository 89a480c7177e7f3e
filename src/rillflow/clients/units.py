"""Writes rows into storage units. When `put` returns, a row is in one unit, with that unit's durability.

A put goes to the unit with the least to do; when that one cannot take it, to the next. Rows of a failed attempt are
never referred to. Puts of one unit that arrive while one is written share the next write, and its sync.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.batching import Batcher
from rillflow.clients.unit_directory import UNIT_ID_FILE, Directory, check_rows, row_bytes
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, DeadlineExceeded, RillflowError, StorageError, Unavailable, WireError
from rillflow.storage import SegmentWriter
from rillflow.storage.records import view_of
from rillflow.storage.segments import SEGMENT_BYTES
from rillflow.types import Durability, Row, UnitInfo, Units
from rillflow.wire.client import DEFAULT_DEADLINE
from rillflow.wire.server import DEFAULT_BODY_LIMIT

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

    Rows = Sequence[Mapping[str, Buffer]]


# ---------------------------------------------------------------- puts that share a write

WAITING_BYTES = 256 << 20
# The bytes of one group, unless one put alone has more. A disk writes as much in the time of a sync. A larger group
# would keep callers waiting that could go on after a smaller one.
_GROUP_BYTES = 2 << 20
# A write of this size into the page cache takes less time than waking a thread for it. A disk that is behind makes
# writers wait: after one put that took so long, the thread writes, until one is quick again.
_BRIEF_BYTES = 256 << 10
_BRIEF_SECONDS = 0.001


class GroupedPuts:
    """Runs `put` in a thread of its own, for all who wait at once. Bad rows are refused before they join a group.

    A group that is `brief`, given the bytes of its columns, is put by the event loop itself, unless the last group took
    longer than that. Belongs to one event loop. A caller that stops waiting may leave rows behind that have no
    reference.
    """

    def __init__(
        self,
        put: Callable[[Rows], list[Row]],
        *,
        limit: int = WAITING_BYTES,
        brief: Callable[[int], bool] = lambda size: False,
    ) -> None:
        self._put = put
        self._limit = limit
        self._brief = brief
        self._quick = True  # as the last group was
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
            if self._quick and self._brief(self._batcher.size):
                places = iter(self._timed(rows))
            else:
                places = iter(await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, rows))
        except RillflowError:
            raise
        except Exception as error:
            raise StorageError(f"a put failed: {type(error).__name__}: {error}", "see the log") from error
        return [list(islice(places, len(one))) for one in puts]

    def _timed(self, rows: Rows) -> list[Row]:
        begun = perf_counter()
        try:
            return self._put(rows)
        finally:
            self._quick = perf_counter() - begun < _BRIEF_SECONDS


# ---------------------------------------------------------------- units

PUT_LIMIT = DEFAULT_BODY_LIMIT - (1 << 20)  # bytes of columns in one body; the rest is names and lengths
_ROW_EXTRA = 1 << 10  # names and lengths of a row, at most, as far as a body's size is concerned
_PAUSE = 0.1


class LocalWriter:
    """Writes straight into the folder of a unit on this host. Any thread may put; puts follow one another.

    The caller has checked the rows with `check_rows`.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, durability: Durability = "process") -> None:
        try:
            self.unit = (folder / UNIT_ID_FILE).read_text()
        except OSError as error:
            raise StorageError(f"{folder} is not the folder of a storage unit: {error}", "start the unit") from error
        self._writer = SegmentWriter(folder, segment_bytes, durability)
        self._lock = threading.Lock()

    def put(self, rows: Rows) -> list[Row]:
        with self._lock:
            places = self._writer.write(rows)
        return [Row(unit=self.unit, segment=s, offset=o, length=n) for s, o, n in places]

    def brief(self, size: int) -> bool:
        """Return whether a put of columns of `size` bytes is only a short write into the page cache of an open file."""
        return size <= _BRIEF_BYTES and self._writer.appends(size)

    def close(self) -> None:
        with self._lock:
            self._writer.close()


class _Local:
    """A unit on this host: one writer, whose syncs concurrent puts share."""

    def __init__(self, info: UnitInfo, segment_bytes: int) -> None:
        self._writer = LocalWriter(Path(info.path), segment_bytes=segment_bytes, durability=info.durability)
        self._puts = GroupedPuts(self._writer.put, brief=self._writer.brief)
        self.put = self._puts.put_checked

    async def close(self) -> None:
        await self._puts.close()
        self._writer.close()


class UnitWriter:
    """Puts rows from one event loop. `units` lists the units; see `Directory`."""

    def __init__(
        self,
        units: Callable[[], Awaitable[Units]],
        token: str,
        *,
        allow_local: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._directory = Directory(units, token, clock=self._clock)
        self._allow_local = allow_local
        self._segment_bytes = segment_bytes
        self._local: dict[tuple[str, str, Durability], _Local] = {}
        self._under_way: Counter[str] = Counter()  # own bytes by unit
        self._mine: Counter[str] = Counter()  # those, and what went since the list of units was renewed
        self._mine_since = 0
        self._closed = False

    async def put(self, rows: Rows, deadline: float = DEFAULT_DEADLINE, *, ledger: int = 0) -> list[Row]:
        """Return where the rows are, once their unit has acknowledged them. All rows of one call go to one unit, which
        keeps those of this ledger."""
        size = check_rows(rows)
        if not rows:
            return []
        end = self._clock.monotonic() + deadline
        try:
            async with asyncio.timeout(deadline):
                return await self._try_all(rows, size, end, ledger)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no storage unit took {len(rows)} rows within {deadline:.0f} s", "look at the logs of the units"
            ) from error

    async def close(self) -> None:
        """Puts that have reached a folder on this host are still written; all others fail."""
        self._closed = True
        while self._local:
            await self._local.popitem()[1].close()
        await self._directory.close()

    # ------------------------------------------------------------ choosing

    async def _try_all(self, rows: Rows, size: int, end: float, ledger: int) -> list[Row]:
        """Unit after unit, the least loaded first; then all over again, until one takes the rows."""
        failed: dict[str, RillflowError] = {}
        since = 0
        while True:
            listed = [info for info in await self._directory.units(since=since) if info.ledger == ledger]
            units = [info for info in listed if info.unit not in failed]
            if self._closed:
                raise WireError("the writer was closed", "make a new one")
            if not units:
                self._raise_hopeless(list(failed.values()), end)
                since, failed = self._directory.asked, {}
                await asyncio.sleep(_PAUSE)
                continue
            info = self._choose(units, size)
            try:
                share = (end - self._clock.monotonic()) / len(units)
                return await self._put(info, rows, size, share, others=len(units) > 1)
            except BadRequest:  # no unit would take it
                raise
            except RillflowError as error:
                failed[info.unit] = error
                since = self._directory.asked

    def _raise_hopeless(self, errors: list[RillflowError], end: float) -> None:
        """Trying again helps where one unit might come back: not where all disks refuse, nor when time is over."""
        refused = all(isinstance(error, StorageError) for error in errors)
        if errors and (refused or self._clock.monotonic() + _PAUSE >= end):
            raise errors[-1]

    def _choose(self, units: list[UnitInfo], size: int) -> UnitInfo:
        """The least loaded that has room; the one on this host where that makes no difference."""
        if self._mine_since != self._directory.asked:
            # The new list of loads includes the puts that had finished before it was made.
            self._mine_since = self._directory.asked
            self._mine = self._under_way.copy()
        return min(
            units,
            key=lambda info: (
                info.free < 2 * size,
                info.load + self._mine[info.unit],
                not self._directory.here(info),
            ),
        )

    # ------------------------------------------------------------ writing

    async def _put(self, info: UnitInfo, rows: Rows, size: int, deadline: float, *, others: bool) -> list[Row]:
        """`others` says whether another unit may take the rows when this one takes too long."""
        self._mine[info.unit] += size
        self._under_way[info.unit] += size
        try:
            if not self._allow_local or not self._directory.here(info):
                return await self._put_there(info, rows, deadline)
            if not others:  # the deadline is the caller's own
                return await self._here(info).put(rows, size)
            async with asyncio.timeout(deadline):
                return await self._here(info).put(rows, size)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the disk of unit {info.unit} is too slow", "look at its load") from error
        finally:
            self._under_way[info.unit] -= size

    def _here(self, info: UnitInfo) -> _Local:
        key = (info.unit, info.path, info.durability)
        if key not in self._local:
            self._local[key] = _Local(info, self._segment_bytes)
        return self._local[key]

    async def _put_there(self, info: UnitInfo, rows: Rows, deadline: float) -> list[Row]:
        client, end = self._directory.client(info), self._clock.monotonic() + deadline
        places: list[Row] = []
        for part in _parts(rows):
            places += await client.put_rows(part, max(end - self._clock.monotonic(), 0.001))
        return places


def _parts(rows: Rows) -> Iterator[list[dict[str, Any]]]:
    """The rows in the same order, in parts that fit into a body."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        length = row_bytes(row) + _ROW_EXTRA
        if part and size + length > PUT_LIMIT:
            yield part
            part, size = [], 0
        part.append({name: _packable(data) for name, data in row.items()})
        size += length
    if part:
        yield part


def _packable(data: Buffer) -> Any:
    """msgpack writes bytes and views of bytes."""
    return view_of(data.view(np.uint8)) if isinstance(data, np.ndarray) else data
