"""A storage unit as a process of its own: puts, reads and byte ranges over HTTP, and a beat to the dataflow service.

Puts that arrive while one is written share the next write. Nothing blocks the event loop: the disk is touched in
threads. A segment is dropped only when the beat's answer names it, and reported as dropped once it is gone. At its
start and every `FIND_SECONDS` a unit tells which segments it has: rows that were put and never reported are reclaimed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from rillflow.clients.units import GroupedPuts
from rillflow.config import Recipe
from rillflow.contracts import Clock, StorageUnit, SystemClock
from rillflow.dataflow.units.files import FileUnit
from rillflow.dataflow.units.redis import RedisUnit
from rillflow.errors import BadRequest, RillflowError, RunError
from rillflow.types import GetRows, PutRows, RowsGot, RowsPut, UnitBeat, UnitBeatReply, UnitInfo
from rillflow.types.routes import BYTES, Dataflow, StorageUnits
from rillflow.wire import Client, Service
from rillflow.wire.messages import Request, Response
from rillflow.wire.tokens import Keyring

T = TypeVar("T")
log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
BEAT_DEADLINE = 10.0
FIND_SECONDS = 30.0
HALF_LIFE = 5.0  # seconds after which written bytes count half
_READERS = 4
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


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
