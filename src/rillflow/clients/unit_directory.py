"""The storage units of a run, how each is reached, and the columns that their rows may have.

A unit is reached by its folder on this host, else by its URL. Columns are checked wherever rows enter or are asked for,
before anything is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, RillflowError, Unavailable, WireError
from rillflow.storage.records import view_of
from rillflow.types import COLUMNS, GetRows, Row, UnitInfo, Units, column_dtype
from rillflow.types.routes import StorageUnits
from rillflow.wire import Client

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

log = logging.getLogger(__name__)

UNIT_ID_FILE = "unit"
GET_LIMIT = 64 << 20  # bytes that a unit reads for one call
FRESH_SECONDS = 2.0


def is_here(info: UnitInfo) -> bool:
    """The folder can be read on this host and is the same unit, not another one at the same path."""
    try:
        return bool(info.path) and (Path(info.path) / UNIT_ID_FILE).read_text() == info.unit
    except OSError:
        return False


class UnitClient(Client):
    """One storage unit over HTTP. Every call is one attempt: its caller knows other units, or asks where it is now."""

    async def put_rows(self, rows: Sequence[dict[str, Any]], deadline: float) -> list[Row]:
        """`rows` of anything that msgpack writes as bytes."""
        body = msgspec.msgpack.encode({"rows": rows})  # as a PutRows, which names bytes alone
        return (await self._once(StorageUnits.put, body, deadline)).rows

    async def get_rows(self, rows: list[Row], columns: list[str], deadline: float) -> list[dict[str, bytes]]:
        body = msgspec.msgpack.encode(GetRows(rows=rows, columns=columns))
        return (await self._once(StorageUnits.get_rows, body, deadline)).rows

    async def get_range(self, segment: int, start: int, end: int, deadline: float) -> bytes:
        """The bytes [start, end) of a segment; CorruptData when the unit does not have them."""
        path = StorageUnits.segment.path.replace("{number:int}", str(segment))
        asked = {"range": f"bytes={start}-{end - 1}"}
        answer = await self._asked("GET", path, b"", deadline, asked)
        if answer.status != 206:
            raise self._error(path, answer)
        if len(answer.body) != end - start:
            raise WireError(f"{self.peer} answered {path} with {len(answer.body)} bytes instead of {end - start}")
        return answer.body


class Directory:
    """The units, asked for again after two seconds or when a caller says that something is wrong with one.

    A unit that was heard of once is remembered: its folder can be read while its process is down.
    """

    def __init__(self, units: Callable[[], Awaitable[Units]], token: str, *, clock: Clock | None = None) -> None:
        self._units = units
        self._token = token
        self._clock = clock or SystemClock()
        self._listed: list[UnitInfo] = []
        self._known: dict[str, UnitInfo] = {}
        self._here: dict[tuple[str, str], bool] = {}
        self._clients: dict[str, UnitClient] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._closed = False
        self.asked = 0  # how often the list was renewed

    async def units(self, *, since: int = 0) -> list[UnitInfo]:
        """The units heard of lately, renewed at least once after the `since`th time."""
        if not self._fresh(since):
            async with self._asking:
                if not self._fresh(since):  # the previous holder of the lock may have asked
                    await self._ask()
        return self._listed

    def _fresh(self, since: int) -> bool:
        return self.asked > since and self._clock.monotonic() - self._asked_at <= FRESH_SECONDS

    async def _ask(self) -> None:
        try:
            # With known units it does not wait long for a new list: they may be well while the service is silent.
            async with asyncio.timeout(FRESH_SECONDS if self._listed else None):
                self._listed = (await self._units()).units
        except (RillflowError, TimeoutError) as error:
            if not self._listed:
                raise
            log.warning("the list of storage units stays as it was: %s", error or "no answer")
        self._known.update((info.unit, info) for info in self._listed)
        self._asked_at = self._clock.monotonic()
        self.asked += 1

    async def find(self, unit: str, *, since: int = 0) -> UnitInfo | None:
        """Return a unit by its name; None if it is unknown."""
        if unit not in self._known or since:
            await self.units(since=since or self.asked)
        return self._known.get(unit)

    def here(self, info: UnitInfo) -> bool:
        key = (info.unit, info.path)
        if key not in self._here:
            self._here[key] = is_here(info)
        return self._here[key]

    def client(self, info: UnitInfo) -> UnitClient:
        if self._closed:
            raise WireError("the client of the storage units was closed", "make a new one")
        if not info.url:
            raise Unavailable(f"unit {info.unit} listens nowhere", "is its process running?")
        found = self._clients.get(info.url)
        if found is None:
            found = self._clients[info.url] = UnitClient(info.url, self._token, peer=f"unit {info.unit}")
        return found

    async def close(self) -> None:
        """Calls that are under way fail."""
        self._closed = True
        while self._clients:
            await self._clients.popitem()[1].close()


# ---------------------------------------------------------------- columns

# Packed choices of experts and texts have other lengths.
_PER_TOKEN = frozenset(name for name in COLUMNS if name not in ("experts", "transcript", "answer"))


@lru_cache(4096)
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a column; raises BadRequest for an unknown name."""
    known = column_dtype(name)
    if known is None:
        raise BadRequest(
            f"unknown columns {name!r:.80}",
            f"the columns are {', '.join(COLUMNS)}; one of your own ends in its dtype, such as `values.f4`",
        )
    return np.dtype(known)


def dtypes_of(names: Sequence[str]) -> dict[str, np.dtype[Any]]:
    return {name: dtype_of(name) for name in names}


def row_bytes(row: Mapping[str, Buffer]) -> int:
    return sum(view_of(data).nbytes for data in row.values())


def check_rows(rows: Sequence[Mapping[str, Buffer]]) -> int:
    """Return the bytes of all rows' columns; raises BadRequest for an invalid row: see `check_columns`."""
    return sum([check_columns(row) for row in rows])


def check_columns(row: Mapping[str, Buffer]) -> int:
    """Known names, whole elements, and the same number of tokens in every column that has one value a token.

    Returns the bytes of all columns.
    """
    tokens, size = -1, 0
    for name, data in row.items():
        dtype = dtype_of(name)
        count = _count(name, data, dtype)
        size += count * dtype.itemsize
        if name in _PER_TOKEN:
            if tokens not in (-1, count):
                raise BadRequest(f"columns of one row differ in length: {_lengths(row)}", "one value a token, in each")
            tokens = count
    return size


def _lengths(row: Mapping[str, Buffer]) -> dict[str, int]:
    return {name: _count(name, data, dtype_of(name)) for name, data in row.items() if name in _PER_TOKEN}


def _count(name: str, data: Buffer, dtype: np.dtype[Any]) -> int:
    """How many elements a column has."""
    if isinstance(data, np.ndarray):
        if data.dtype != dtype or not data.flags.c_contiguous:
            raise BadRequest(f"column {name} is no plain array of {dtype}", "np.ascontiguousarray(values, dtype)")
        return data.size
    view = view_of(data)
    if view.nbytes % dtype.itemsize or not view.c_contiguous:
        raise BadRequest(f"column {name} has {view.nbytes} bytes", f"its elements have {dtype.itemsize} bytes each")
    return view.nbytes // dtype.itemsize
