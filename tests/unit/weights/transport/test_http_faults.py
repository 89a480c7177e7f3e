"""Weights over HTTP come whole over bad networks, and from servers that lie."""

from __future__ import annotations

import asyncio
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from http_reader import DATA, NAME, SIZE, Reader, as_given

from rillflow.errors import CorruptData, Unauthorized, Unavailable, WeightsError, WireError
from rillflow.weights.transport import sources
from weight_servers import (
    POLICY,
    Exchange,
    Files,
    between,
    leaves_no_write_behind,
    part_record,
    publish,
    well,
)

pytestmark = pytest.mark.usefixtures("quick_retries")


# ---------------------------------------------------------------- bad networks


async def test_connections_that_are_cut_go_on_where_they_were(reader: Reader, url: str) -> None:
    async def cut(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + body[:200_000])

    async with between(url, cut) as (middle, seen):
        source = reader(middle)
        assert (await source.file(7, NAME)).read_bytes() == DATA
    assert source.transfers[0].retries >= 8
    assert source.transfers[0].bytes == SIZE  # none came twice
    assert len(seen.files) == source.transfers[0].retries + 4


async def test_connections_that_stall_are_cut(reader: Reader, url: str) -> None:
    async def stall(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        if exchange.number < 6:
            await exchange.send(head + body[:100_000])
            await asyncio.sleep(60)
        await exchange.send(head + body)

    async with between(url, stall) as (middle, _):
        source = reader(middle, stall=0.1)
        assert (await source.file(7, NAME)).read_bytes() == DATA
    assert source.transfers[0].retries >= 6  # a busy machine adds stalls
    assert source.transfers[0].bytes == SIZE


async def test_connections_that_drip_are_cut(reader: Reader, url: str) -> None:
    async def drip(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        if exchange.number < 4:
            await exchange.send(head)
            for n in range(1000):
                await exchange.send(body[n : n + 1])
                await asyncio.sleep(0.02)
        await exchange.send(head + body)

    async with between(url, drip) as (middle, _):
        source = reader(middle, stall=0.1)
        assert (await source.file(7, NAME)).read_bytes() == DATA
    assert source.transfers[0].retries >= 4  # a busy machine adds some


async def test_dripping_for_ever_ends_with_an_error(reader: Reader, url: str) -> None:
    async def drip(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head)
        for n in range(1000):
            await exchange.send(body[n : n + 1])
            await asyncio.sleep(0.02)

    async with between(url, drip) as (middle, seen):
        source = reader(middle, stall=0.1, patience=0.5)
        with pytest.raises(Unavailable, match="received bytes are kept"):
            await source.file(7, NAME)
        seen.behave, source._patience = well, 20.0
        assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_lines_and_manifests_are_asked_for_again(reader: Reader, url: str) -> None:
    async with between(url, well) as (middle, seen):
        source = reader(middle)
        seen.cuts = 1
        assert (await source.manifest(7)).version == 7
        seen.cuts = 1
        assert (await source.line()).head == 7
        seen.cuts = 1000
        with pytest.raises(Unavailable):
            await source.manifest(8)


@pytest.mark.parametrize("status", [429, 500, 503, 302])
async def test_refusals_pass(reader: Reader, url: str, status: int) -> None:
    async def busy(exchange: Exchange) -> None:
        if exchange.number < 5:
            await exchange.say(status, b"busy")
        else:
            await exchange.pass_on()

    async with between(url, busy) as (middle, _):
        assert (await reader(middle).file(7, NAME)).read_bytes() == DATA


@pytest.mark.parametrize(("status", "error"), [(404, WeightsError), (416, WireError), (401, Unauthorized)])
async def test_refusals_that_stay(reader: Reader, url: str, status: int, error: type[Exception]) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.say(status)

    async with between(url, refuse) as (middle, seen):
        with pytest.raises(error):
            await reader(middle).file(7, NAME)
        assert len(seen.files) <= 8


async def test_a_restart_goes_on_with_what_has_come(reader: Reader, url: str) -> None:
    async def half(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + body[: len(body) // 2])

    async with between(url, half) as (middle, seen):
        with pytest.raises(Unavailable):
            await reader(middle, patience=0.0).file(7, NAME)
        there = sum(end - start for start, end in part_record(reader.cache, 7, NAME))
        assert there >= SIZE // 8  # of one range at least
        seen.behave = well
        later = reader(middle)
        assert (await later.file(7, NAME)).read_bytes() == DATA
    assert later.transfers[0].bytes == SIZE - there
    assert part_record(reader.cache, 7, NAME) == []


@pytest.mark.parametrize("damage", ["bytes", "record", "another size"])
async def test_a_damaged_part_is_fetched_anew(reader: Reader, url: str, damage: str) -> None:
    folder = reader.cache / "v00000007"
    folder.mkdir(parents=True)
    (folder / f".{NAME}.part").write_bytes(bytes(SIZE if damage != "another size" else 5))
    record = f'{{"sha256":"{sha256(DATA).hexdigest()}","size":{SIZE},"have":[[0,1000000]]}}'
    (folder / f".{NAME}.part.json").write_text(record if damage != "record" else "[1, {")
    source = reader(url)
    assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_a_damaged_copy_is_fetched_anew(reader: Reader, url: str) -> None:
    path = await reader(url).file(7, NAME)
    path.write_bytes(bytes(SIZE))
    assert (await reader(url).file(7, NAME)).read_bytes() == DATA


# ---------------------------------------------------------------- servers that lie


async def lie(exchange: Exchange) -> None:
    head, body = await exchange.answer()
    await exchange.send(head + bytes([body[0] ^ 1]) + body[1:])


async def test_wrong_bytes_never_get_a_name(reader: Reader, url: str) -> None:
    async with between(url, lie) as (middle, seen):
        source = reader(middle)
        with pytest.raises(CorruptData):
            await source.file(7, NAME)
        assert not (reader.cache / "v00000007" / NAME).exists()
        assert len(seen.files) <= 8
        seen.behave = well
        assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_another_server_mends_what_one_lies(reader: Reader, url: str) -> None:
    async with between(url, lie) as (liar, _):
        source = reader(liar, url)
        as_given(source)
        assert (await source.file(7, NAME)).read_bytes() == DATA
    assert source.transfers[0].sources == [url]


async def test_a_liar_among_several_is_found(reader: Reader, url: str) -> None:
    async def lie_and_cut(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + bytes([body[0] ^ 1]) + body[1:100_000])

    async with between(url, lie_and_cut) as (liar, _):
        source = reader(liar, url)
        as_given(source)
        assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_another_content_range_is_refused(reader: Reader, url: str) -> None:
    async def shift(exchange: Exchange) -> None:
        head, _ = await exchange.answer()
        await exchange.send(head.replace(b"content-range: bytes ", b"content-range: bytes 1"))

    async with between(url, shift) as (middle, _):
        with pytest.raises(Exception, match="instead of"):
            await reader(middle).file(7, NAME)


@pytest.mark.parametrize("what", ["head.json", "v00000007/manifest.json"])
async def test_lines_and_manifests_of_others_are_refused(reader: Reader, tmp_path: Path, url: str, what: str) -> None:
    path = tmp_path / "weights" / POLICY / what
    path.write_bytes(path.read_bytes().replace(b"7", b"6", 1))
    source = reader(url)
    with pytest.raises(CorruptData):
        await (source.line() if what == "head.json" else source.manifest(7))


def write_again(root: Path, version: int, files: Files) -> None:
    """As a trainer that starts again and finds a version damaged."""
    shutil.rmtree(root / POLICY / f"v{version:08d}")
    publish(root, version, files)


async def test_a_version_that_was_written_again(reader: Reader, tmp_path: Path, url: str) -> None:
    source = reader(url)
    before = await source.line()
    assert set((await source.manifest(7)).files) == {NAME}
    write_again(tmp_path / "weights", 7, {"other.bin": DATA[:1000]})
    assert await source.line(before, wait=20) != before
    assert (await source.file(7, "other.bin")).read_bytes() == DATA[:1000]


async def test_those_who_ask_for_the_line_at_once_are_followed_by_one_task(reader: Reader, url: str) -> None:
    source = reader(url)
    await asyncio.gather(*(source.line() for _ in range(5)))
    assert [task.get_name() for task in asyncio.all_tasks()].count("follow-line") == 1


async def test_a_line_is_waited_for_longer_than_it_is_followed(
    reader: Reader, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_FOLLOWED", 0.05)
    monkeypatch.setattr(sources, "_WAIT", 0.05)
    source = reader(url)
    known = await source.line()
    waiting = asyncio.create_task(source.line(known, wait=30))
    await asyncio.sleep(0.5)
    publish(tmp_path / "weights", 8, {NAME: DATA})
    assert (await waiting).head == 8


async def test_who_is_cancelled_leaves_no_write_behind(
    reader: Reader, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leaves_no_write_behind(reader(url, streams=1).file(7, NAME), monkeypatch)
