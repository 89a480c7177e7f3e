"""A unit's service: closed routes, exact ranges, shared syncs, and a heartbeat that drops segments."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
import pytest

from rillflow.clients.unit_directory import UnitClient
from rillflow.config import load_recipe
from rillflow.dataflow.storage_unit import HALF_LIFE, FileUnit, UnitService, serve_unit
from rillflow.errors import BadRequest, CorruptData, Unavailable
from rillflow.types import UnitBeat, UnitBeatReply
from rillflow.types.routes import Dataflow, StorageUnits
from rillflow.wire import Client, Service

TOKEN = "secret"


class Ledger:
    """The service that receives heartbeats."""

    def __init__(self):
        self.beats = []
        self.drop = []
        self.idle = []
        self.error = None
        self._news = asyncio.Event()

    async def beat(self, beat: UnitBeat) -> UnitBeatReply:
        self._news.set()
        if self.error:
            raise self.error
        self.beats.append(beat)
        return UnitBeatReply(drop=self.drop, idle=self.idle)

    async def beaten(self, times=1):
        for _ in range(times):
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 30)


class Hand:
    """A clock that is moved by hand."""

    def __init__(self):
        self.at = 0.0

    def now(self):
        return self.at

    def monotonic(self):
        return self.at


@pytest.fixture
def unit(tmp_path):
    unit = FileUnit(tmp_path / "unit", segment_bytes=400)
    yield unit
    unit.close()


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def clock():
    return Hand()


@pytest.fixture
async def service(unit, ledger, clock):
    service = UnitService(unit, TOKEN, ledger.beat, clock=clock, every=0.01)
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def client(service):
    client = UnitClient((await service.info()).url, TOKEN)
    yield client
    await client.close()


def row(n):
    return {"mask": bytes(n), "values.f4": bytes(8)}


async def test_ranges_are_exact_and_bounded(service, client):
    places = await client.put_rows([row(100), row(50)], 10)
    whole = await client.get_range(0, 0, places[0].length, 10)
    assert len(whole) == places[0].length
    assert await client.get_range(0, 8, 24, 10) == whole[8:24]
    with pytest.raises(CorruptData, match="missing"):
        await client.get_range(99, 0, 8, 10)
    with pytest.raises(CorruptData, match="ends before"):
        await client.get_range(0, 0, 1 << 20, 10)
    with pytest.raises(BadRequest):
        await client.get_range(0, 0, 1 << 40, 10)


@pytest.mark.parametrize(
    "header", [None, "bytes=0-", "bytes=-5", "bytes=0-5,7-9", "rows=1-2", "bytes=9-3", "bytes=x-y"]
)
async def test_anything_but_one_range_is_refused(client, header):
    await client.put_rows([row(100)], 10)
    headers = {"authorization": f"Bearer {TOKEN}"} | ({"range": header} if header else {})
    async with aiohttp.ClientSession() as session, session.get(f"{client.url}/segments/0", headers=headers) as answer:
        assert answer.status == 400


async def test_a_range_is_answered_as_http_says(client):
    (place,) = await client.put_rows([row(100)], 10)
    headers = {"authorization": f"Bearer {TOKEN}", "range": "bytes=8-15"}
    async with aiohttp.ClientSession() as session, session.get(f"{client.url}/segments/0", headers=headers) as answer:
        assert answer.status == 206
        assert answer.headers["content-range"] == "bytes 8-15/*"
        assert len(await answer.read()) == 8
    assert place.segment == 0


async def test_puts_that_come_meanwhile_share_a_sync(unit, client, monkeypatch):
    real, groups, began, go = unit._writer.put, [], threading.Event(), threading.Event()

    def slow(rows):
        groups.append(len(rows))
        began.set()
        assert go.wait(30)
        return real(rows)

    monkeypatch.setattr(unit._writer, "put", slow)
    tasks = [asyncio.create_task(client.put_rows([row(n)], 30)) for n in range(1, 31)]
    assert await asyncio.to_thread(began.wait, 30)
    go.set()
    places = [place for task in tasks for place in await task]
    assert len(groups) < 20
    got = await client.get_rows(places, ["mask"], 10)
    assert [len(one["mask"]) for one in got] == list(range(1, 31))


async def test_info_is_where_it_is_and_what_it_has_to_do(service, client, clock, unit):
    before = await service.info()
    assert before.load == 0
    assert before.url == client.url
    await client.put_rows([row(1000), row(2000)], 10)
    busy = await service.info()
    assert busy.load > 3000
    clock.at += HALF_LIFE
    later = await service.info()
    assert later.load == pytest.approx(busy.load / 2)
    raw = Client(client.url, TOKEN)
    assert (await raw.call(StorageUnits.info, None)).unit == unit.info().unit
    await raw.close()


async def test_what_the_beat_says_is_dropped_and_told(service, client, ledger, unit):
    places = await client.put_rows([row(300) for _ in range(5)], 10)
    segments = sorted({place.segment for place in places})
    assert len(segments) == 5
    ledger.drop = [*segments, 77]
    await ledger.beaten(2)
    ledger.drop = []
    await ledger.beaten(2)
    told = {number for beat in ledger.beats for number in beat.dropped}
    assert told == {*segments[:-1], 77}  # the last one is still written into; one that was never there is gone
    assert unit.remaining(segments) == segments[-1:]
    assert ledger.beats[-1].info.unit == places[0].unit
    assert ledger.beats[-1].dropped == []


async def test_a_unit_says_which_idle_segments_nobody_writes_into(service, client, ledger):
    places = await client.put_rows([row(300) for _ in range(5)], 10)
    segments = sorted({place.segment for place in places})
    ledger.idle = [*segments, 77]
    await ledger.beaten(2)
    assert ledger.beats[-1].closed == [*segments[:-1], 77]  # the last one is still written into


async def test_a_beat_that_fails_is_made_again_with_its_news(service, client, ledger):
    places = await client.put_rows([row(300) for _ in range(3)], 10)
    ledger.drop = [places[0].segment]
    while not service_dropped(ledger):
        ledger.error = Unavailable("restarting")
        await ledger.beaten(2)
        ledger.error = None
        await ledger.beaten(2)
    assert (await client.get_rows(places[1:2], ["mask"], 10))[0] == {"mask": bytes(300)}


def service_dropped(ledger):
    return any(beat.dropped for beat in ledger.beats)


async def test_the_process_serves_what_the_recipe_asks_for(tmp_path):
    ledger, ready = Ledger(), asyncio.get_running_loop().create_future()
    dataflow = Service("dataflow", TOKEN)
    dataflow.on(Dataflow.unit_beat, ledger.beat)
    url = await dataflow.start()
    recipe = load_recipe("quickstart", [])
    task = asyncio.create_task(serve_unit(recipe, tmp_path, "4", TOKEN, url, on_ready=ready.set_result))
    client = UnitClient(await asyncio.wait_for(ready, 30), TOKEN)
    (place,) = await client.put_rows([row(5)], 10)
    await ledger.beaten()
    assert ledger.beats[-1].info.url == client.url
    assert ledger.beats[-1].info.path == str(tmp_path / "units" / "4")
    assert place.unit.startswith("4-")
    await client.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await dataflow.stop()


async def test_the_load_is_never_negative_when_two_look_at_once(tmp_path):
    unit = FileUnit(tmp_path)
    service = UnitService(unit, "secret", None)
    first = asyncio.Event()
    real = service._in_thread

    async def slow(work):
        found = await real(work)
        if not first.is_set():
            first.set()
            await asyncio.sleep(0.1)
        return found

    service._in_thread = slow
    early = asyncio.create_task(service.info())
    await first.wait()
    unit.put([{"values.f4": bytes(400_000)}])
    late = await service.info()
    assert late.load >= 400_000
    assert (await early).load > 200_000
    await service.stop()
    unit.close()
