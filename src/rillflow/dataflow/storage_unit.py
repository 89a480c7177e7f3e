"""A storage unit: payload columns in append-only segments of a folder, and the process that serves a unit over HTTP.

The unit's id is drawn once and lies in the folder, so a reader that finds the same path on another host, or the path of
another run, does not take it for this unit. Processes on this host may write into the folder beside the unit
(`clients.units.LocalWriter`). `redis_unit` has the unit on a Redis server.

The service takes puts, reads and byte ranges, and sends a beat to the dataflow service. Puts that arrive while one is
written share the next write. Nothing blocks the event loop: the disk is touched in threads. A segment is dropped only
when the beat's answer names it, and reported as dropped once it is gone. At its start and every `FIND_SECONDS` a unit
tells which segments it has: rows that were put and never reported are reclaimed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import msgspec

from rillflow.clients.unit_directory import GET_LIMIT, UNIT_ID_FILE, check_rows, dtypes_of
from rillflow.clients.units import GroupedPuts, LocalWriter
from rillflow.config import Recipe
from rillflow.contracts import Clock, StorageUnit, SystemClock
from rillflow.errors import BadRequest, CorruptData, RillflowError, RunError
from rillflow.storage import SegmentReader, disk_errors, write_atomic
from rillflow.storage.records import Place
from rillflow.storage.segment_reader import read_range
from rillflow.storage.segments import SEGMENT_BYTES, closed_segments, drop_segments, segment_numbers, segment_path
from rillflow.types import Durability, GetRows, PutRows, Row, RowsGot, RowsPut, UnitBeat, UnitBeatReply, UnitInfo
from rillflow.types.routes import BYTES, Dataflow, StorageUnits
from rillflow.wire import Client, Service
from rillflow.wire.messages import Request, Response
from rillflow.wire.tokens import Keyring

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

T = TypeVar("T")
log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
BEAT_DEADLINE = 10.0
FIND_SECONDS = 30.0
HALF_LIFE = 5.0  # seconds after which written bytes count half
_READERS = 4
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class FileUnit:
    """Implements contracts.StorageUnit. Any thread may call; puts follow one another."""

    def __init__(
        self,
        folder: Path,
        name: str = "0",
        *,
        segment_bytes: int = SEGMENT_BYTES,
        durability: Durability = "process",
    ) -> None:
        self._folder = folder.resolve()
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not (self._folder / UNIT_ID_FILE).exists():
                write_atomic(self._folder / UNIT_ID_FILE, f"{name}-{secrets.token_hex(4)}".encode())
        self._writer = LocalWriter(self._folder, segment_bytes=segment_bytes, durability=durability)
        self._reader = SegmentReader(self._folder)
        self._durability = durability
        self._growth = Growth(self._folder)

    def put(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Row]:
        check_rows(rows)
        return self._writer.put(rows)

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        dtypes = dtypes_of(columns)
        check_asked(rows, self._writer.unit)
        got: list[dict[str, bytes]] = []
        for one in self._reader.read([Place(row.segment, row.offset, row.length) for row in rows], dtypes):
            if isinstance(one, CorruptData):
                raise one
            got.append({name: array.tobytes() for name, array in one.items()})
        return got

    def read_range(self, segment: int, start: int, end: int) -> bytes:
        """Raw bytes [start, end) of a segment, for readers on other hosts, which verify them."""
        if not 0 <= start < end or end - start > GET_LIMIT:
            raise BadRequest(f"there is no range {start}-{end}", f"ask for 1 to {GET_LIMIT} bytes")
        return read_range(self._folder, segment, start, end)

    def drop(self, segments: Sequence[int]) -> None:
        """Segments that are still being written stay: see `remaining`."""
        drop_segments(self._folder, segments)

    def closed(self, segments: Sequence[int]) -> list[int]:
        return closed_segments(self._folder, segments)

    def found(self) -> list[int]:
        return closed_segments(self._folder, segment_numbers(self._folder))

    def remaining(self, segments: Sequence[int]) -> list[int]:
        return [number for number in segments if segment_path(self._folder, number).exists()]

    def written(self) -> int:
        return self._growth.count()

    def info(self) -> UnitInfo:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        return UnitInfo(
            unit=self._writer.unit, path=str(self._folder), kind="files", free=free, durability=self._durability
        )

    def close(self) -> None:
        self._writer.close()


def check_asked(rows: Sequence[Row], unit: str) -> None:
    """Rows of this unit, at places that can exist, and not too many bytes at once."""
    for row in rows:
        if row.unit != unit:
            raise BadRequest(f"this unit is {unit}, not {row.unit}", "ask the unit that the row names")
        if min(row.segment, row.offset, row.length) < 0:
            raise BadRequest(f"there is no row {row}", "use a row that a put has returned")
    if sum(row.length for row in rows) > GET_LIMIT:
        raise BadRequest(f"the rows are larger than {GET_LIMIT} bytes together", "ask for fewer rows at once")


class Growth:
    """Counts the bytes that any process has written into a folder of segments.

    The files are preallocated: what counts is where their data ends, not their size.

    Any thread may count.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[str, tuple[int, int]] = {}  # by file name: when it was changed last, where its data ended
        self._total = 0
        self._lock = threading.Lock()
        self.count()
        self._total = 0  # existing bytes do not count as growth

    def count(self) -> int:
        """Bytes written since the start."""
        seen: dict[str, tuple[int, int]] = {}
        with self._lock, os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".seg"):
                    with suppress(FileNotFoundError):  # dropped in this moment
                        seen[entry.name] = self._look(entry)
            self._ends = seen
            return self._total

    def _look(self, entry: os.DirEntry[str]) -> tuple[int, int]:
        changed, end = self._ends.get(entry.name, (-1, 0))
        now = entry.stat().st_mtime_ns
        if now == changed:
            return changed, end
        found = max(end, _data_end(entry.path, end))
        self._total += found - end
        return now, found


def _data_end(path: str, start: int) -> int:
    """Return the offset of the first hole from `start` on; the end of the file on a file system without holes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(descriptor, start, os.SEEK_HOLE)
    except OSError:  # `start` lies behind the end: nothing was added
        return start
    finally:
        os.close(descriptor)


# ------------------------------------------------------------ the service


class ServedUnit(StorageUnit, Protocol):
    """The methods of a unit that the service needs beyond the contract."""

    def found(self) -> list[int]:
        """Return the existing segments that are not being written; some of them may be gone."""

    def remaining(self, segments: Sequence[int]) -> list[int]:
        """Those of the segments that are still there."""

    def written(self) -> int:
        """Bytes that were written since the unit was opened, by whomever."""


@runtime_checkable
class RangedUnit(Protocol):
    """A unit whose segments readers on other hosts may read as they are."""

    def read_range(self, segment: int, start: int, end: int) -> bytes: ...


class UnitService(Service):
    """Serves `unit`; `beat` carries news to the dataflow service and brings back what to drop."""

    def __init__(
        self,
        unit: ServedUnit,
        token: str | Keyring,
        beat: Callable[[UnitBeat], Awaitable[UnitBeatReply]],
        *,
        clock: Clock | None = None,
        every: float = BEAT_SECONDS,
    ) -> None:
        super().__init__("unit", token)
        self._unit = unit
        self._beat = beat
        self._clock = clock or SystemClock()
        self._every = every
        self._puts = GroupedPuts(unit.put)
        self._readers = ThreadPoolExecutor(_READERS, "unit-reads")
        self._beating: asyncio.Task[None] | None = None
        self._url = ""
        self._lately, self._written, self._looked_at = 0.0, 0, self._clock.monotonic()
        self.gauge("rillflow_unit_written_bytes", "Bytes written since the unit was opened", lambda: self._written)
        self.gauge("rillflow_unit_waiting_bytes", "Bytes of puts not yet acknowledged", lambda: self._puts.bytes)
        self.on(StorageUnits.put, self._put)
        self.on(StorageUnits.get_rows, self._get)
        self.on(StorageUnits.info, self.info)
        if isinstance(unit, RangedUnit):
            self.raw(StorageUnits.segment, self._segment)

    # ------------------------------------------------------------ life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._url = await super().start(host, port)
        self._beating = asyncio.create_task(self._beat_on(), name="unit-beat")
        return self._url

    async def stop(self) -> None:
        """The unit stays open: it is closed by who opened it, after this."""
        if self._beating is not None:
            self._beating.cancel()
            with suppress(asyncio.CancelledError):
                await self._beating
        await super().stop()
        await self._puts.close()
        self._readers.shutdown()

    # ------------------------------------------------------------ routes

    async def _put(self, body: PutRows) -> RowsPut:
        return RowsPut(rows=await self._puts.put(body.rows))

    async def _get(self, body: GetRows) -> RowsGot:
        return RowsGot(rows=await self._in_thread(lambda: self._unit.get(body.rows, body.columns)))

    async def info(self) -> UnitInfo:
        """The unit as others should see it now."""
        info, written = await self._in_thread(lambda: (self._unit.info(), self._unit.written()))
        now = self._clock.monotonic()
        self._lately *= 0.5 ** ((now - self._looked_at) / HALF_LIFE)
        self._lately += max(0, written - self._written)  # two may have looked at once, the later one first
        self._written, self._looked_at = max(written, self._written), now
        return msgspec.structs.replace(info, url=self._url, load=self._lately + self._puts.bytes)

    async def _segment(self, request: Request) -> Response:
        """The bytes of a segment that the `Range` header names, which must be one range within the file."""
        unit, number = self._unit, int(request.params["number"])
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if asked is None or not isinstance(unit, RangedUnit):
            raise BadRequest("a segment is read by one range", "send `Range: bytes=FIRST-LAST`")
        start, end = int(asked[1]), int(asked[2]) + 1
        data = await self._in_thread(lambda: unit.read_range(number, start, end))
        headers = {"content-range": f"bytes {start}-{end - 1}/*", "accept-ranges": "bytes"}
        return Response(data, 206, headers, BYTES)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    # ------------------------------------------------------------ the beat

    async def _beat_on(self) -> None:
        dropped: list[int] = []
        closed: list[int] = []
        silent, find_at = False, -math.inf
        while True:
            try:
                now = self._clock.monotonic()
                async with asyncio.timeout(BEAT_DEADLINE):
                    found = await self._in_thread(self._unit.found) if now >= find_at else []
                    news = UnitBeat(info=await self.info(), dropped=dropped, closed=closed, found=found)
                    reply = await self._beat(news)
                silent = False
                if now >= find_at:
                    find_at = now + FIND_SECONDS
                dropped = await self._drop(reply.drop)
                closed = await self._in_thread(partial(self._unit.closed, reply.idle))
            except (RillflowError, TimeoutError) as error:
                if not silent:
                    log.warning("the dataflow service did not hear this unit: %s", error)
                silent = True
            except Exception:
                log.exception("a beat failed")
            await asyncio.sleep(self._every)

    async def _drop(self, segments: list[int]) -> list[int]:
        """Those of the segments that are gone now; the others will be named again."""
        if not segments:
            return []

        def work() -> list[int]:
            self._unit.drop(segments)
            left = set(self._unit.remaining(segments))
            return [number for number in segments if number not in left]

        try:
            return await self._in_thread(work)
        except RillflowError as error:
            log.error("segments %s could not be dropped: %s", segments, error)
            return []


# ---------------------------------------------------------------- the process

UNITS = "units"
_GONE = 5.0  # seconds without an answer of the service of a run that has ended


def open_unit(recipe: Recipe, folder: Path, name: str) -> ServedUnit:
    """The unit `name` of the run in `folder`, new or as it was left."""
    wanted = recipe.dataflow.units
    if wanted.kind == "redis":
        from rillflow.dataflow.redis_unit import RedisUnit

        return RedisUnit(wanted.redis, folder.resolve().name, name, durability=wanted.durability)
    return FileUnit(folder / UNITS / name, name, segment_bytes=wanted.segment_bytes, durability=wanted.durability)


async def serve_unit(
    recipe: Recipe,
    folder: Path,
    name: str,
    token: str,
    dataflow_url: str,
    *,
    keyring: Keyring | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[str], None] = lambda url: None,
    patience: float | None = None,
) -> None:
    """Serve until cancelled; `on_ready` gets the URL. `token` is the unit's, with which it calls the dataflow service;
    the `keyring` decides who may call it (default: `token` is the run's own). An unsupervised unit has a `patience`: it
    ends with the run's service, and with a RunError after that many seconds without an answer."""
    unit = await asyncio.to_thread(open_unit, recipe, folder, name)
    dataflow = Client(dataflow_url, token, peer="dataflow")
    clock = asyncio.get_running_loop().time
    heard, ended = clock(), False

    async def beat(news: UnitBeat) -> UnitBeatReply:
        nonlocal heard, ended
        reply = await dataflow.call(Dataflow.unit_beat, news, BEAT_DEADLINE)
        heard, ended = clock(), reply.ended
        return reply

    try:
        service = UnitService(unit, keyring or token, beat)
        try:
            on_ready(await service.start(host, port))
            while patience is None or clock() - heard < (_GONE if ended else patience):  # noqa: ASYNC110
                await asyncio.sleep(BEAT_SECONDS)
            if not ended:
                raise RunError(
                    f"the run's service has not answered for {patience:.0f} s", "is the run over, or its host gone?"
                )
        finally:
            await service.stop()
    finally:
        await dataflow.close()
        unit.close()
