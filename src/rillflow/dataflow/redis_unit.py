"""A storage unit on a Redis server: every row a hash of columns.

The server must never evict, and must write its log before it answers (`appendonly yes`). With the durability `machine`
it must sync the log too (`appendfsync always`). With `process` it may leave that to the kernel (`appendfsync no`), but
not to a thread (`everysec`): while that one syncs, answers go out before the log is written. The server is asked when
the unit opens, and refused otherwise. Rows lie in buckets of at most 1,024, which are this unit's
segments; a row's offset is its number in the bucket. Every process that opens the unit starts a bucket of its own,
whose number was never used. A server that comes back without its data has lost the numbers too: then the unit is
another one, with a new id, so that nothing which refers to the old one can be taken for a new row.

Besides its columns a row has a field of its own name ``""``: the checksum of an index, and the index, which holds
every column's length and checksum.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from xxhash import xxh3_64_intdigest

from rillflow.clients.unit_directory import check_rows, dtypes_of, row_bytes
from rillflow.dataflow.storage_unit import check_asked
from rillflow.errors import ConfigError, CorruptData, DiskFull, StorageError, Unavailable
from rillflow.storage.records import Index, index_of, view_of
from rillflow.types import Durability, Row, UnitInfo

try:
    import redis
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry
except ImportError:  # an extra: see `_connect`
    redis = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

log = logging.getLogger(__name__)

BUCKET_ROWS = 1024
_MOST_FOUND = 10_000  # the latest buckets: earlier ones were reported before
TIMEOUT = 10.0
_PIPELINE_BYTES = 8 << 20  # what one round trip carries, unless a single row is longer
_INDEX = ""
_decode_index = msgspec.msgpack.Decoder(Index).decode
_APPENDFSYNC: dict[Durability, tuple[str, ...]] = {"process": ("no", "always"), "machine": ("always",)}


class RedisUnit:
    """Implements contracts.StorageUnit. Any thread may call; puts follow one another.

    `run` keeps the units of several runs on one server apart.
    """

    def __init__(
        self,
        url: str,
        run: str,
        name: str = "0",
        *,
        durability: Durability = "process",
        timeout: float = TIMEOUT,
    ) -> None:
        self._redis = _connect(url, timeout)
        self._lock = threading.Lock()
        self._written = 0
        self._durability = durability
        with self._errors():
            _check_server(self._redis, durability)
            self._name, self._id_key = name, f"rillflow:{run}:unit:{name}"
            (self._unit, self._bucket), self._count = self._next_bucket(), 0

    def put(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Row]:
        check_rows(rows)
        with self._lock, self._errors():
            places: list[Row] = []
            pipeline, size = self._redis.pipeline(transaction=False), 0
            for row in rows:
                place = self._place(row_bytes(row))
                pipeline.hset(self._key(place), mapping=_fields(row))
                places.append(place)
                size += place.length
                if size > _PIPELINE_BYTES:
                    pipeline.execute()
                    size = 0
            pipeline.execute()
            self._written += sum(place.length for place in places)
            return places

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        dtypes_of(columns)
        check_asked(rows, self._unit)
        with self._errors():
            pipeline = self._redis.pipeline(transaction=False)
            for row in rows:
                pipeline.hmget(self._key(row), [_INDEX, *columns])
            return [_verified(row, columns, values) for row, values in zip(rows, pipeline.execute(), strict=True)]

    def drop(self, segments: Sequence[int]) -> None:
        """The bucket that is being filled stays: see `remaining`."""
        with self._errors():
            for bucket in segments:
                if bucket != self._bucket:
                    self._redis.unlink(*(f"rillflow:{self._unit}:{bucket}:{n}" for n in range(BUCKET_ROWS)))

    def closed(self, segments: Sequence[int]) -> list[int]:
        return [bucket for bucket in segments if bucket != self._bucket]

    def found(self) -> list[int]:
        return list(range(max(0, self._bucket - _MOST_FOUND), self._bucket))

    def remaining(self, segments: Sequence[int]) -> list[int]:
        return [bucket for bucket in segments if bucket == self._bucket]

    def written(self) -> int:
        return self._written

    def info(self) -> UnitInfo:
        with self._errors():
            memory = self._redis.info("memory")
        most = memory.get("maxmemory") or memory.get("total_system_memory") or 0
        free = max(0, most - memory.get("used_memory", 0))
        return UnitInfo(unit=self._unit, path="", kind="redis", free=free, durability=self._durability)

    def close(self) -> None:
        self._redis.close()

    def _next_bucket(self) -> tuple[str, int]:
        """The unit's id, which the server keeps, and a number that was never used under it."""
        self._redis.set(self._id_key, f"{self._name}-{secrets.token_hex(4)}", nx=True)
        unit = self._redis.get(self._id_key).decode()
        return unit, int(self._redis.incr(f"rillflow:{unit}:buckets")) - 1

    def _place(self, length: int) -> Row:
        if self._count == BUCKET_ROWS:
            (self._unit, self._bucket), self._count = self._next_bucket(), 0
        self._count += 1
        return Row(unit=self._unit, segment=self._bucket, offset=self._count - 1, length=length)

    def _key(self, row: Row) -> str:
        return f"rillflow:{self._unit}:{row.segment}:{row.offset}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Return an error with advice for one of the server or the connection."""
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise Unavailable(
                f"the Redis server does not answer: {error}", "is it running, and is dataflow.units.redis its URL?"
            ) from error
        except redis.OutOfMemoryError as error:
            raise DiskFull("the Redis server is full", "raise its maxmemory, then `rillflow resume RUN`") from error
        except redis.RedisError as error:
            raise StorageError(f"the Redis server refused: {error}", "look at its log") from error


def _connect(url: str, timeout: float) -> Any:
    if redis is None:
        raise ConfigError("dataflow.units.kind is redis, but redis-py is not here", "pip install 'rillflow[redis]'")
    try:
        again = Retry(ConstantBackoff(0.1), 1)
        return redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=again)
    except ValueError as error:
        # The parser's message may quote a part of the password.
        raise ConfigError("dataflow.units.redis is not a URL of a server", "redis://host:6379/0") from error


def _check_server(server: Any, durability: Durability) -> None:
    """Refuse a server that could lose a row which it has acknowledged."""
    best = _APPENDFSYNC[durability][0]
    names = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
    try:
        found = {name: _text(server.config_get(name).get(name)) for name in names}
    except redis.ResponseError:
        log.warning(
            "the Redis server does not tell its settings: rows survive its crash only if it has appendonly yes and "
            "appendfsync %s, and none must be evicted",
            best,
        )
        return
    if found["appendonly"] != "yes" or found["appendfsync"] not in _APPENDFSYNC[durability]:
        raise ConfigError(
            f"the Redis server may lose rows that it has acknowledged (dataflow.units.durability is {durability})",
            f"put these two lines into redis.conf and start it again:\n    appendonly yes\n    appendfsync {best}",
        )
    if found["maxmemory"] != "0" and found["maxmemory-policy"].startswith("allkeys"):
        raise ConfigError(
            f"the Redis server evicts rows when it is full (maxmemory-policy {found['maxmemory-policy']})",
            "put this line into redis.conf and start it again:\n    maxmemory-policy noeviction",
        )


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _fields(row: Mapping[str, Buffer]) -> dict[str, Any]:
    views = {name: view_of(data) for name, data in row.items()}
    index = msgspec.msgpack.encode(index_of(views))
    sealed = xxh3_64_intdigest(index).to_bytes(8, "little") + index
    return {_INDEX: sealed} | {name: view.tobytes() for name, view in views.items()}


def _verified(row: Row, columns: Sequence[str], values: list[bytes | None]) -> dict[str, bytes]:
    """The columns that the row has, if they are as they were written."""
    sealed = values[0]
    if sealed is None or xxh3_64_intdigest(sealed[8:]) != int.from_bytes(sealed[:8], "little"):
        raise CorruptData(f"{row} is missing or damaged", "the unit lost data")
    index = _decode_index(sealed[8:])
    if sum(length for length, _ in index.values()) != row.length:
        raise CorruptData(f"there is another row at {row}", "use a row that a put has returned")
    found: dict[str, bytes] = {}
    for name, value in zip(columns, values[1:], strict=True):
        if name in index:
            if value is None or (len(value), xxh3_64_intdigest(value)) != index[name]:
                raise CorruptData(f"column {name} of {row} is missing or damaged", "the unit lost data")
            found[name] = value
    return found
