"""Every kind of storage unit keeps the contract, in the own process and behind its service."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import redis

from redis_server import DURABLE, redis_server
from rillflow.clients.unit_directory import GET_LIMIT, UnitClient
from rillflow.dataflow.redis_unit import RedisUnit
from rillflow.dataflow.storage_unit import FileUnit, UnitService
from rillflow.errors import BadRequest, CorruptData
from rillflow.storage.segments import segment_path
from rillflow.types import COLUMNS, Row, UnitBeatReply

TOKEN = "secret"
OWN = {"values.f4": "<f4", "returns.f8": "<f8", "ids.i8": "<i8", "short.f2": "<f2", "flags.u1": "|u1", "n.i4": "<i4"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), *DURABLE) as found:
        yield found


class Files:
    def __init__(self, folder):
        self._folder = folder

    def open(self):
        return FileUnit(self._folder, segment_bytes=1000)

    def damage(self, row):
        """The first byte of the body's last column is another one."""
        path = segment_path(self._folder, row.segment)
        with open(path, "r+b") as file:
            file.seek(row.offset + row.length - 8)
            byte = file.read(1)
            file.seek(row.offset + row.length - 8)
            file.write(bytes([byte[0] ^ 1]))


class Redis:
    def __init__(self, url, run):
        self._url, self._run = url, run

    def open(self):
        return RedisUnit(self._url, self._run)

    def damage(self, row):
        with redis.Redis.from_url(self._url) as client:
            key = f"rillflow:{row.unit}:{row.segment}:{row.offset}"
            data = bytearray(client.hget(key, "mask"))
            data[0] ^= 1
            client.hset(key, "mask", bytes(data))


class Direct:
    """A unit in this process, called like one over HTTP."""

    def __init__(self, kind):
        self.kind = kind
        self.unit = kind.open()

    async def put(self, rows):
        return await asyncio.to_thread(self.unit.put, rows)

    async def get(self, rows, columns):
        return await asyncio.to_thread(self.unit.get, rows, columns)

    async def drop(self, segments):
        await asyncio.to_thread(self.unit.drop, segments)

    async def id(self):
        return self.unit.info().unit

    async def close(self):
        self.unit.close()


class OverHttp:
    """The same unit behind its service; what to drop comes with the answer to a beat."""

    def __init__(self, kind):
        self.kind = kind
        self.unit = kind.open()
        self._drop = []
        self._beaten = asyncio.Event()
        self._service = UnitService(self.unit, TOKEN, self._beat, every=0.01)

    async def start(self):
        self._client = UnitClient(await self._service.start(), TOKEN)
        return self

    async def _beat(self, beat):
        self._beaten.set()
        asked, self._drop = self._drop, []
        return UnitBeatReply(drop=asked)

    async def put(self, rows):
        return await self._client.put_rows(rows, 30)

    async def get(self, rows, columns):
        return await self._client.get_rows(rows, columns, 30)

    async def drop(self, segments):
        self._drop = list(segments)
        for _ in range(2):  # the heartbeat with the news, and the one after
            self._beaten.clear()
            await asyncio.wait_for(self._beaten.wait(), 30)

    async def id(self):
        return (await self._service.info()).unit

    async def close(self):
        await self._client.close()
        await self._service.stop()
        self.unit.close()


@pytest.fixture(params=["files", "redis", "files over http", "redis over http"])
async def opened(request, tmp_path, monkeypatch):
    """Opens the unit, the same one each time, any number of times."""
    monkeypatch.setattr("rillflow.dataflow.redis_unit.BUCKET_ROWS", 4)
    if request.param.startswith("files"):
        kind = Files(tmp_path / "unit")
    else:
        kind = Redis(request.getfixturevalue("server").url, tmp_path.name)

    @asynccontextmanager
    async def open_one():
        subject = await OverHttp(kind).start() if "http" in request.param else Direct(kind)
        try:
            yield subject
        finally:
            await subject.close()

    return open_one


def row(n=3):
    return {
        name: np.arange(n).astype(dtype).tobytes()
        for name, dtype in COLUMNS.items()
        if name not in ("transcript", "mask")
    } | {"mask": bytes(n)}


async def test_all_columns_and_own_ones_come_back_bit_for_bit(opened):
    rng = np.random.default_rng(0)
    own = {name: rng.integers(0, 100, 5 + n).astype(dtype).tobytes() for n, (name, dtype) in enumerate(OWN.items())}
    rows = [row(3) | own | {"transcript": "[„ü“]".encode()}, row(0), {"values.f4": b""}, {}, own]
    async with opened() as unit:
        places = await unit.put(rows)
        assert await unit.get(places, [*COLUMNS, *OWN]) == rows
        assert await unit.get(places[::-1], [*COLUMNS, *OWN]) == rows[::-1]


async def test_only_the_columns_asked_for_as_far_as_they_are_there(opened):
    async with opened() as unit:
        places = await unit.put([row(2), row(2) | {"values.f4": bytes(8)}])
        assert await unit.get(places, ["mask", "values.f4"]) == [
            {"mask": bytes(2)},
            {"mask": bytes(2), "values.f4": bytes(8)},
        ]
        assert await unit.get(places, []) == [{}, {}]


async def test_nothing_put_and_nothing_asked(opened):
    async with opened() as unit:
        assert await unit.put([]) == []
        assert await unit.get([], ["tokens"]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": b""}, "unknown columns"),
        ({"values": b""}, "unknown columns"),
        ({"tokens": b"12345"}, "5 bytes"),
        ({"mask": b"\x01"}, "differ in length"),
        ({"values.f4": b"12345"}, "5 bytes"),
    ],
)
async def test_bad_rows_are_refused_with_all_of_their_put(opened, change, message):
    async with opened() as unit:
        with pytest.raises(BadRequest, match=message):
            await unit.put([row(), row() | change])
        assert len(await unit.put([row()])) == 1


async def test_bad_asks_are_refused(opened):
    async with opened() as unit:
        (place,) = await unit.put([row()])
        name = place.unit
        with pytest.raises(BadRequest, match="unknown columns"):
            await unit.get([place], ["tokens", "secrets"])
        with pytest.raises(BadRequest, match="not other"):
            await unit.get([Row(unit="other", segment=0, offset=0, length=8)], ["tokens"])
        for segment, offset, length in ((0, -1, 8), (-1, 0, 8), (0, 0, -8)):
            with pytest.raises(BadRequest):
                await unit.get([Row(unit=name, segment=segment, offset=offset, length=length)], ["tokens"])
        with pytest.raises(BadRequest, match="fewer rows"):
            await unit.get([Row(unit=name, segment=0, offset=0, length=GET_LIMIT + 1)], ["tokens"])
        for segment, offset in ((999, 0), (place.segment, 1 << 40)):
            with pytest.raises(CorruptData):
                await unit.get([Row(unit=name, segment=segment, offset=offset, length=64)], ["tokens"])


async def test_a_damaged_row_is_an_error_and_the_others_are_not(opened):
    async with opened() as unit:
        places = await unit.put([row(), row(), row()])
        unit.kind.damage(places[1])
        with pytest.raises(CorruptData):
            await unit.get(places, ["mask"])
        assert await unit.get([places[0], places[2]], ["mask"]) == [{"mask": bytes(3)}] * 2
        assert await unit.get(places[1:2], ["tokens"]) == [{"tokens": row()["tokens"]}]  # was not asked for


async def test_dropped_segments_are_gone_and_the_open_one_stays(opened):
    async with opened() as unit:
        places = await unit.put([row(20) for _ in range(10)])
        last = places[-1].segment
        kept = [place for place in places if place.segment == last]
        assert len(kept) < 10
        await unit.drop([*range(last + 1), 12345])
        for place in places:
            if place.segment == last:
                assert await unit.get([place], ["mask"]) == [{"mask": bytes(20)}]
            else:
                with pytest.raises(CorruptData):
                    await unit.get([place], ["mask"])
        await unit.drop(range(last))


async def test_a_restart_keeps_the_name_and_the_rows_and_uses_no_number_again(opened):
    async with opened() as unit:
        name = await unit.id()
        places = await unit.put([row(n) for n in range(9)])
    used = {place.segment for place in places}
    for _ in range(2):
        async with opened() as unit:
            assert await unit.id() == name
            held = [place for place in places if place.segment in used]
            assert len(await unit.get(held, ["mask"])) == len(held)
            (new,) = await unit.put([row(50)])
            assert new.segment > max(used)
            used.add(new.segment)
            places.append(new)
    async with opened() as unit:
        await unit.drop(sorted(used))
        with pytest.raises(CorruptData):
            await unit.get(places[-1:], ["mask"])
    async with opened() as unit:
        (new,) = await unit.put([row()])
        assert new.segment > max(used)


async def test_concurrent_puts_and_gets(opened):
    async with opened() as unit:

        async def one(n):
            (place,) = await unit.put([row(n)])
            assert await unit.get([place], ["tokens"]) == [{"tokens": row(n)["tokens"]}]
            return place

        places = await asyncio.gather(*(one(n) for n in range(60)))
        assert len({(place.segment, place.offset) for place in places}) == 60
        assert await unit.get(places, ["mask"]) == [{"mask": bytes(n)} for n in range(60)]
