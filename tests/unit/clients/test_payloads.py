"""Payload reads: mapped, by byte ranges or by calls; the same bits on every way, and all damage named at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from units_support import TOKEN, few_units, row

from rillflow.clients.payloads import DamagedRows, PayloadReader, split_calls, split_ranges
from rillflow.clients.unit_directory import check_columns
from rillflow.errors import BadRequest, CorruptData, DeadlineExceeded, StorageError, Unauthorized, WireError
from rillflow.storage.segments import segment_path
from rillflow.types import COLUMNS, Row, UnitInfo, Units
from rillflow.wire.tokens import Keyring

NAMES = ["tokens", "logprobs", "mask"]
LAST = "experts"  # of the columns that a row has
WAYS = ["mapped", "ranges", "calls"]


@pytest.fixture
async def few(tmp_path):
    async with few_units(tmp_path / "units", 3, segment_bytes=20_000) as found:
        yield found


@pytest.fixture(params=WAYS)
async def reader(request, few):
    if request.param == "calls":
        for n in range(3):
            few.change(n, path="", kind="redis")
    found = few.reader(allow_map=request.param == "mapped", deadline=20.0, patience=0.0)
    yield found
    await found.close()


def put_all(few, count):
    """Rows of all units in turn; row n has n + 1 tokens."""
    return [few.units[n % 3].put([row(n + 1)])[0] for n in range(count)]


def damage(few, place):
    path = Path(few.units[0].info().path).parent / place.unit.split("-")[0] / segment_path(Path(), place.segment).name
    with open(path, "r+b") as file:
        file.seek(place.offset + place.length - 8)  # the last column
        file.write(b"\xff" * 8)


async def test_rows_of_many_units_come_back_in_order(few, reader):
    places = put_all(few, 150)
    order = np.random.default_rng(0).permutation(150)
    found = await reader.read([places[n] for n in order], NAMES)
    for n, one in zip(order, found, strict=True):
        assert list(one) == NAMES
        for name in NAMES:
            assert one[name].dtype == np.dtype(COLUMNS[name])
            assert not one[name].flags.writeable
            np.testing.assert_array_equal(one[name], np.arange(n + 1).astype(COLUMNS[name]))
    twice = await reader.read([places[4], places[4]], ["mask"])
    assert [len(one["mask"]) for one in twice] == [5, 5]
    assert await reader.read([], NAMES) == []


async def test_all_damaged_missing_and_unknown_rows_are_named_at_once(few, reader):
    places = put_all(few, 90)
    bad = [places[n] for n in (0, 7, 8, 44, 89)]
    for place in bad:
        damage(few, place)
    missing = Row(unit=places[1].unit, segment=777, offset=0, length=64)
    behind = Row(unit=places[1].unit, segment=places[1].segment, offset=1 << 30, length=64)
    unknown = Row(unit="nobody", segment=0, offset=0, length=64)
    never = Row(unit=places[1].unit, segment=0, offset=-8, length=64)
    asked = [*places[:45], missing, unknown, behind, *places[45:], never]
    with pytest.raises(DamagedRows) as caught:
        await reader.read(asked, [LAST])
    assert caught.value.rows == [row for row in asked if row in [*bad, missing, behind, unknown, never]]
    assert isinstance(caught.value, CorruptData)
    good = [place for place in places if place not in bad]
    assert len(await reader.read(good, [LAST])) == 85
    assert len(await reader.read(places, ["tokens"])) == 90  # the damaged column was not asked for


async def test_a_sample_may_have_several_rows_and_the_later_one_wins(few, reader):
    base = few.units[0].put([row(3), row(4)])
    (values,) = few.units[1].put([{"values.f4": np.ones(3, "<f4")}])
    (better,) = few.units[2].put([{"values.f4": np.full(3, 2, "<f4"), "extra.i8": np.arange(2)}])
    one, two = await reader.read_samples([[base[0], values, better], [base[1]]], ["tokens", "values.f4", "extra.i8"])
    assert list(one["values.f4"]) == [2, 2, 2]
    assert list(one["extra.i8"]) == [0, 1]
    assert list(one["tokens"]) == [0, 1, 2]
    assert set(two) == {"tokens"}
    assert await reader.read_samples([[], [values]], ["values.f4"]) != []


def test_only_columns_with_a_value_for_each_token_have_the_same_length():
    packed = b"\0" * 23  # choices of experts: a head, and several bytes a token
    assert check_columns({"tokens": np.zeros(3, "<i4"), "mask": np.zeros(3, "|u1"), "experts": packed}) == 38
    with pytest.raises(BadRequest, match="differ in length"):
        check_columns({"tokens": np.zeros(3, "<i4"), "mask": np.zeros(2, "|u1")})


async def test_unknown_columns_are_refused(few, reader):
    with pytest.raises(BadRequest, match="unknown columns"):
        await reader.read(put_all(few, 1), ["secrets"])


async def test_mapped_reads_are_views_that_outlive_their_segment(few):
    reader = few.reader()
    places = put_all(few, 3)
    found = await reader.read(places, ["tokens"])
    assert reader.mapped == 3
    assert not found[2]["tokens"].flags.owndata
    for place in places:
        os.unlink(Path(few.units[0].info().path).parent / place.unit[0] / segment_path(Path(), place.segment).name)
    with pytest.raises(DamagedRows):
        await reader.read(places, ["tokens"])
    assert list(found[2]["tokens"]) == [0, 1, 2]
    await reader.close()


async def test_a_mapped_reader_follows_a_growing_unit(few):
    reader = few.reader()
    for n in (1, 2, 3000, 3):
        (found,) = await reader.read(few.units[0].put([row(n)]), ["tokens"])
        assert len(found["tokens"]) == n
    await reader.close()


@pytest.mark.parametrize("other", ["missing", "another"])
async def test_a_folder_that_is_not_the_unit_is_not_mapped(few, tmp_path, other):
    if other == "another":
        (tmp_path / other).mkdir()
        (tmp_path / other / "unit").write_text("0-other")
    few.elsewhere(tmp_path / other)
    reader = few.reader()
    (found,) = await reader.read(few.units[0].put([row(3)]), ["tokens"])
    assert reader.mapped == 0
    assert len(found["tokens"]) == 3
    await reader.close()


async def test_a_folder_is_read_while_its_unit_is_down(few):
    reader = few.reader()
    places = put_all(few, 3)
    await reader.read(places, ["tokens"])
    await few.services[0].stop()
    few.listed = []
    assert len(await reader.read(places, ["mask"])) == 3
    await reader.close()


async def test_a_unit_that_comes_back_elsewhere_is_found_there(few):
    places = put_all(few, 3)
    url = few.listed[0].url
    few.change(0, url="http://127.0.0.1:1")

    async def back():
        if few.asked >= 2:
            few.change(0, url=url)
        return await few.tell()

    reader = PayloadReader(back, TOKEN, allow_map=False, deadline=20.0)
    assert len(await reader.read(places, ["tokens"])) == 3
    await reader.close()


async def test_a_unit_that_is_heard_of_a_little_later_is_not_lost(few):
    places = put_all(few, 3)
    there, few.listed = few.listed, []

    async def later():
        if few.asked >= 3:
            few.listed = there
        return await few.tell()

    reader = PayloadReader(later, TOKEN, patience=30.0)
    assert len(await reader.read(places, ["tokens"])) == 3
    await reader.close()


async def test_a_unit_that_stays_away_ends_in_an_error_that_is_not_damage(few):
    places = put_all(few, 3)
    few.change(1, url="http://127.0.0.1:1")
    reader = few.reader(allow_map=False, deadline=0.5)
    with pytest.raises(DeadlineExceeded, match="could not be read"):
        await reader.read(places, ["tokens"])
    await reader.close()


async def test_long_rows_and_long_reads_are_asked_for_in_pieces(few, monkeypatch):
    places = few.units[0].put([row(n) for n in (1, 900, 900, 900, 1, 2, 5000)])
    limit = 2 * places[1].length + 1
    monkeypatch.setattr("rillflow.clients.payloads.GET_LIMIT", limit)
    monkeypatch.setattr("rillflow.clients.payloads._RANGE_BYTES", limit)
    monkeypatch.setattr("rillflow.dataflow.storage_unit.GET_LIMIT", limit)
    reader = few.reader(allow_map=False)
    found = await reader.read(places, ["tokens"])
    assert [len(one["tokens"]) for one in found] == [1, 900, 900, 900, 1, 2, 5000]
    await reader.close()


def place(segment, offset, length):
    return Row(unit="u", segment=segment, offset=offset, length=length)


def test_adjacent_records_are_one_range():
    far = 5 << 20
    rows = [place(1, 0, 100), place(0, 100, 100), place(0, 0, 100), place(0, far, 8), place(0, far + 8, 9 << 20)]
    assert split_ranges(rows, range(5)) == [[2, 1], [3], [4], [0]]
    assert split_ranges([place(0, n * 100, 100) for n in range(1000)], range(1000)) == [list(range(1000))]
    assert split_ranges(rows, []) == []


def test_calls_are_bounded_in_rows_and_bytes():
    assert [len(part) for part in split_calls([place(0, n, 10) for n in range(130)], range(130))] == [64, 64, 2]
    assert [len(part) for part in split_calls([place(0, n, 40 << 20) for n in range(3)], range(3))] == [1, 1, 1]


async def test_a_read_of_nothing_asks_nobody():
    async def nobody():
        raise AssertionError

    assert await PayloadReader(nobody, TOKEN).read([], ["tokens"]) == []


async def test_a_unit_without_address_or_folder_is_waited_for():
    async def units():
        return Units(units=[UnitInfo(unit="u", path="/nowhere")])

    reader = PayloadReader(units, TOKEN, deadline=0.3)
    with pytest.raises(DeadlineExceeded):
        await reader.read([place(0, 0, 64)], ["tokens"])
    await reader.close()


def test_clients_do_not_load_the_loops():
    """Trainers import the clients; the ledger must not come with them."""
    code = "import rillflow.clients.units, rillflow.clients.payloads, sys; print('rillflow.dataflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def test_an_error_of_a_unit_is_raised_as_it_is(few, reader, monkeypatch):
    places = put_all(few, 6)
    if reader._allow_map:
        monkeypatch.setattr("rillflow.storage.segment_reader.mmap.mmap", _refuse)
    else:
        for service in few.services:
            monkeypatch.setattr(service, "keyring", Keyring.of_run("another"))
    with pytest.raises((StorageError, Unauthorized)):
        await reader.read(places, NAMES)


def _refuse(*arguments, **options):
    raise OSError("too many open files")


async def test_places_that_cannot_be_are_damage(few, reader):
    good, *_ = put_all(few, 3)
    bad = [
        Row(unit=good.unit, segment=segment, offset=offset, length=length)
        for segment, offset, length in [
            *[(0, 1 << 60, 80), (0, (1 << 63) - 8, 1 << 62), (1 << 63, 0, 80), (0, 0, 1 << 40), (0, 0, 0)],
            *[(-1, 0, 80), (0, -8, 80), (0, 0, -80), (0, 8, good.length), (0, 0, good.length + 8)],
        ]
    ]
    with pytest.raises(DamagedRows) as caught:
        await reader.read([*bad, good], NAMES)
    assert caught.value.rows == bad
    assert len(await reader.read([good], NAMES)) == 1


async def test_closing_ends_reads_that_are_under_way(few, monkeypatch):
    places = put_all(few, 3)
    asked = asyncio.Event()

    async def never(path):
        asked.set()
        await asyncio.sleep(60)

    for service in few.services:
        monkeypatch.setattr(service, "_in_thread", never)
    reader = few.reader(allow_map=False)
    reading = asyncio.create_task(reader.read(places, NAMES))
    await asked.wait()
    await reader.close()
    with pytest.raises(WireError, match="closed"):
        await asyncio.wait_for(reading, 60)
    assert reader._directory._clients == {}
