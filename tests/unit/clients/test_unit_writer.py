"""Writing into storage units: direct on this host, over HTTP elsewhere, to whichever has the least to do."""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import numpy as np
import pytest
from units_support import TOKEN, few_units, row

from rillflow.clients.units import LocalWriter, UnitWriter
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.errors import BadRequest, DeadlineExceeded, DiskFull, StorageError, Unavailable, WireError
from rillflow.types import Units
from rillflow.wire.tokens import Keyring


@pytest.fixture
async def few(tmp_path):
    async with few_units(tmp_path / "units", 3) as found:
        yield found


@pytest.fixture
async def writer(few):
    found = few.writer()
    yield found
    await found.close()


@pytest.fixture
def posts(few, monkeypatch):
    """How many puts came over HTTP."""
    counted = []
    for service in few.services:
        real = service._puts.put

        async def put(rows, real=real):
            counted.append(len(rows))
            return await real(rows)

        monkeypatch.setattr(service._puts, "put", put)
    return counted


async def read(few, places, name="tokens"):
    reader = few.reader()
    try:
        return [one[name] for one in await reader.read(places, [name])]
    finally:
        await reader.close()


async def test_rows_go_straight_into_the_folder_on_this_host(few, writer, posts):
    places = await writer.put([row(1), row(2)])
    assert [len(tokens) for tokens in await read(few, places)] == [1, 2]
    assert posts == []
    assert await writer.put([]) == []


async def test_rows_go_over_http_elsewhere_in_bodies_that_fit(few, tmp_path, posts, monkeypatch):
    monkeypatch.setattr("rillflow.clients.units.PUT_LIMIT", 6000)
    few.elsewhere(tmp_path / "nowhere")
    writer = few.writer()
    rows = [{"values.f4": np.full(n, n, "<f4"), "more.f2": np.ones(3, "<f2")} for n in (1, 500, 500, 400, 1)]
    places = await writer.put(rows)
    assert posts == [2, 2, 1]
    assert len({place.unit for place in places}) == 1
    assert [list(found) for found in await read(few, places, "values.f4")] == [[n] * n for n in (1, 500, 500, 400, 1)]
    await writer.close()


async def test_concurrent_puts_share_syncs(few, writer, monkeypatch):
    few.listed = few.listed[:1]
    few.change(0, durability="machine")  # as the unit says, not as the writer was made
    await writer.put([row(1)])
    real, syncs = os.fdatasync, []

    def counted(descriptor):
        syncs.append(descriptor)
        real(descriptor)

    monkeypatch.setattr("rillflow.storage.segments.os.fdatasync", counted)
    places = await asyncio.gather(*(writer.put([row(n)]) for n in range(1, 101)))
    assert len(syncs) < 30
    assert [len(tokens) for tokens in await read(few, [place for (place,) in places])] == list(range(1, 101))


async def test_one_bad_row_fails_its_own_put_only(few, writer):
    bad = row(3) | {"mask": b""}
    found = await asyncio.gather(*(writer.put([one]) for one in (row(1), bad, row(2))), return_exceptions=True)
    assert [isinstance(one, BadRequest) for one in found] == [False, True, False]
    with pytest.raises(BadRequest, match="plain array"):
        await writer.put([{"values.f4": np.zeros(3)}])
    with pytest.raises(BadRequest, match="plain array"):
        await writer.put([{"values.f4": np.zeros(6, "<f4")[::2]}])
    with pytest.raises(BadRequest, match="bytes"):
        await writer.put([{"values.f4": memoryview(bytes(16))[::2]}])


async def test_the_least_loaded_unit_is_chosen(few, writer):
    few.change(0, load=5000.0)
    few.change(1, load=9000.0)
    few.change(2, load=0.0)
    units = [(await writer.put([{"values.f4": bytes(4000)}]))[0].unit[0] for _ in range(5)]
    assert units == ["2", "2", "0", "2", "0"]  # by the reported load and the bytes that it has sent since


async def test_a_unit_without_room_is_the_last_choice(few, writer):
    for n, free in enumerate((1000, 1 << 40, 0)):  # a full disk has 0 bytes left
        few.change(n, free=free, load=float(-n))
    assert (await writer.put([{"values.f4": bytes(4000)}]))[0].unit[0] == "1"


@pytest.mark.parametrize("local", [True, False])
async def test_when_one_unit_fails_the_next_takes_the_rows(few, monkeypatch, local):
    few.change(0, load=-1e9)
    if local:
        real = LocalWriter.put

        def put(self, rows):
            if self.unit.startswith("0"):
                raise DiskFull("no space left")
            return real(self, rows)

        monkeypatch.setattr(LocalWriter, "put", put)
    else:
        few.change(0, url="http://127.0.0.1:1")
    writer = few.writer(allow_local=local)
    (place,) = await writer.put([row(3)], deadline=20.0)
    assert place.unit[0] != "0"
    assert few.asked >= 2  # it read the list of units again
    await writer.close()


async def test_when_all_disks_are_full_the_error_says_so_at_once(few, writer, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.storage.segments.os.pwritev", full)
        with pytest.raises(DiskFull, match="no space left"):
            await writer.put([row(3)])
    assert len(await writer.put([row(3)])) == 1


async def test_a_unit_that_appears_in_time_takes_the_rows(few, writer):
    there, few.listed = few.listed, []

    async def appear():
        await asyncio.sleep(0.3)
        few.listed = there

    _, places = await asyncio.gather(appear(), writer.put([row(3)], deadline=20.0))
    assert len(places) == 1


async def test_no_unit_ends_in_an_error(few):
    few.listed = [few.listed[0]]
    few.change(0, url="http://127.0.0.1:1", path="")
    writer = few.writer()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await writer.put([row(3)], deadline=0.5)
    few.listed = []
    with pytest.raises(DeadlineExceeded, match="no storage unit took"):
        await UnitWriter(few.tell, TOKEN).put([row(3)], deadline=0.3)
    await writer.close()


async def test_the_list_of_units_is_kept_while_nobody_tells_it(few):
    told = [True]

    async def tell():
        if not told.pop():
            raise Unavailable("the dataflow service restarts")
        return Units(units=few.listed)

    writer = UnitWriter(tell, TOKEN, clock=Jumping())
    told[:] = [False, True]
    assert len(await writer.put([row(1)])) == 1
    assert len(await writer.put([row(1)])) == 1
    assert told == []
    await writer.close()


class Jumping:
    """Three seconds pass at every look."""

    def __init__(self):
        self._now = 0.0

    def now(self):
        return self.monotonic()

    def monotonic(self):
        self._now += 3.0
        return self._now


def test_a_local_writer_needs_no_event_loop_and_takes_many_threads(tmp_path):
    unit = FileUnit(tmp_path)
    writer = LocalWriter(tmp_path, segment_bytes=5000)
    places = {}

    def work(n):
        places[n] = writer.put([{"values.f4": np.full(n, n, "<f4")}])[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    writer.close()
    for n in range(30):
        assert unit.get([places[n]], ["values.f4"]) == [{"values.f4": np.full(n, n, "<f4").tobytes()}]
    unit.close()


def test_a_local_writer_needs_a_unit(tmp_path):
    with pytest.raises(StorageError, match="not the folder"):
        LocalWriter(tmp_path)


async def test_units_that_are_known_take_rows_while_nobody_tells_of_them(few, monkeypatch):
    monkeypatch.setattr("rillflow.clients.unit_directory.FRESH_SECONDS", 0.05)
    asked = 0

    async def tell():
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.Event().wait()
        return Units(units=few.listed)

    writer = UnitWriter(tell, TOKEN)
    for _ in range(3):
        assert await writer.put([row(2)], deadline=10.0)
        await asyncio.sleep(0.06)
    assert asked > 1
    await writer.close()


async def test_a_unit_that_answers_nonsense_is_passed_over(few, tmp_path, monkeypatch):
    few.elsewhere(tmp_path / "nowhere")
    few.change(0, load=-1e9)
    monkeypatch.setattr(few.services[0], "keyring", Keyring.of_run("of another run"))  # which has taken its port
    writer = few.writer()
    assert (await writer.put([row(2)]))[0].unit[0] != "0"
    with pytest.raises(BadRequest):
        await writer.put([{"tokens": b"123"}])
    await writer.close()


async def test_a_full_unit_does_not_end_the_wait_for_one_that_comes_back(few, writer, monkeypatch):
    few.listed = few.listed[:2]
    few.change(0, load=-1e9)
    tries = []
    real = LocalWriter.put

    def put(self, rows):
        tries.append(self.unit[0])
        if self.unit.startswith("1"):
            raise DiskFull("no space left")
        if len(tries) < 3:
            raise Unavailable("it starts")
        return real(self, rows)

    monkeypatch.setattr(LocalWriter, "put", put)
    assert (await writer.put([row(2)]))[0].unit[0] == "0"


async def test_closing_while_puts_are_under_way(few, monkeypatch):
    writer = few.writer()
    few.listed = few.listed[:1]
    came, go, real = threading.Event(), threading.Event(), LocalWriter.put

    def put(self, rows):
        came.set()
        go.wait(60)
        return real(self, rows)

    monkeypatch.setattr(LocalWriter, "put", put)
    putting = asyncio.create_task(writer.put([row(3)]))
    assert await asyncio.to_thread(came.wait, 60)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.05)
    with pytest.raises(WireError, match="closed"):
        await writer.put([row(2)])
    go.set()
    await closing
    assert [len(tokens) for tokens in await read(few, await putting)] == [3]
    assert writer._local == {}
