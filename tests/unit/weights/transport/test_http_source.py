"""Weights over HTTP come whole, whatever the network and the servers do, and nothing is fetched twice for nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import CorruptData, DiskFull, Unauthorized, Unavailable, WeightsError, WireError
from rillflow.types import Probe
from rillflow.weights.pull import Puller
from rillflow.weights.store import FolderStore
from rillflow.weights.transport import download as downloads
from rillflow.weights.transport import mirrors as servers
from rillflow.weights.transport import remote
from rillflow.weights.transport.cache import Spans
from rillflow.weights.transport.download import piece_size
from rillflow.weights.transport.remote import EMPTY, HttpSource
from weight_servers import (
    KEY,
    POLICY,
    TOKEN,
    Exchange,
    Files,
    between,
    leaves_no_write_behind,
    part_record,
    publish,
    served,
    some_bytes,
    well,
)

SIZE = 3_000_000
DATA = some_bytes(SIZE)
NAME = "model.bin"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short; their meaning stays."""
    monkeypatch.setattr(downloads, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(downloads, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(servers, "_FIRST_REST", 0.05)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    publish(tmp_path / "weights", 7, {NAME: DATA})
    async with served(tmp_path / "weights") as url:
        yield url


class Reader:
    """Sources that are closed at the end of a test."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._made: list[HttpSource] = []

    def __call__(self, *urls: str, **options: object) -> HttpSource:
        options = {"cache": self.cache, "key": KEY, "token": TOKEN, "patience": 20.0} | options
        self._made.append(HttpSource(f"{','.join(urls)}/{POLICY}", **options))  # type: ignore[arg-type]
        return self._made[-1]

    async def close(self) -> None:
        for source in self._made:
            await source.close()


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Reader]:
    made = Reader(tmp_path / "cache")
    yield made
    await made.close()


def as_given(source: HttpSource) -> None:
    """The first server counts as the nearest."""
    source._mirrors._probing = asyncio.create_task(asyncio.sleep(0))


async def test_a_version_comes_with_its_probe_as_it_was_signed(tmp_path: Path, reader: Reader) -> None:
    probe = Probe(prompts=[[1, 2, 3]], logprobs=[[-1.5, -0.25]], tolerance=0.125)
    store = FolderStore(tmp_path / "weights" / POLICY, KEY)
    store.publish({"w": torch.ones(4)}, 0, None, probe)
    async with served(tmp_path / "weights") as url:
        puller = Puller(reader(url))
        assert (await puller.pull()).probe == probe
        assert await puller.probe(0) == probe
        manifest = store.path(0) / "manifest.json"
        manifest.write_text(manifest.read_text().replace("0.125", "9.0"))
        with pytest.raises(CorruptData, match="not signed with this run's key"):
            await reader(url, cache=tmp_path / "other").manifest(0)


# ---------------------------------------------------------------- parts

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20)


@given(spans, st.integers(60, 70), st.integers(0, 70))
def test_spans_are_sets_of_bytes(pairs: list[tuple[int, int]], size: int, at: int) -> None:
    have, there = Spans(pairs), {n for start, end in pairs for n in range(start, end)}
    assert len(have) == len(there)
    assert {n for start, end in have for n in range(start, end)} == there
    assert {n for start, end in have.missing(size) for n in range(start, end)} == set(range(size)) - there
    assert have.reach(at) == next(n for n in range(at, 200) if n not in there)
    listed = list(have)
    assert all(before[1] < after[0] for before, after in pairwise(listed))


@given(st.integers(1, 1 << 36), st.integers(1, 16))
def test_pieces_are_few_and_fair(size: int, streams: int) -> None:
    left, pieces = size, 0
    while left:
        piece = min(piece_size(size, left, streams, 1 << 40), left)
        assert piece >= min(left, downloads.LEAST_PIECE)
        assert piece <= max(-(-size // streams), downloads.LEAST_PIECE)
        left -= piece
        pieces += 1
    assert pieces <= streams * 32  # each costs a round trip


# ---------------------------------------------------------------- the good case


async def test_a_file_comes_whole_by_several_ranges(reader: Reader, url: str) -> None:
    async with between(url, well) as (middle, seen):
        source = reader(middle)
        path = await source.file(7, NAME)
        assert path.read_bytes() == DATA
        assert sorted(x for one in seen.files if (x := one.range)) == [
            (n * 750_000, (n + 1) * 750_000) for n in range(4)
        ]
        assert await source.file(7, NAME) == path
        assert len(seen.files) == 4
    (transfer,) = source.transfers
    assert (transfer.bytes, transfer.retries, transfer.sources, transfer.version) == (SIZE, 0, [middle], 7)


async def test_those_who_ask_at_once_share_a_download(reader: Reader, url: str) -> None:
    async with between(url, well) as (middle, seen):
        source = reader(middle)
        paths = await asyncio.gather(*(source.file(7, NAME) for _ in range(10)))
        assert len(set(paths)) == 1
        assert len(seen.files) == 4


async def test_a_reader_that_goes_leaves_the_download_to_others(reader: Reader, url: str) -> None:
    gate = asyncio.Event()

    async def slowly(exchange: Exchange) -> None:
        await gate.wait()
        await exchange.pass_on()

    async with between(url, slowly) as (middle, seen):
        source = reader(middle)
        first, second = (asyncio.create_task(source.file(7, NAME)) for _ in range(2))
        await seen.asked.wait()
        first.cancel()
        gate.set()
        assert (await second).read_bytes() == DATA


async def test_a_download_ends_with_its_last_reader(reader: Reader, url: str) -> None:
    async def never(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    async with between(url, never) as (middle, seen):
        source = reader(middle)
        task = asyncio.create_task(source.file(7, NAME))
        await seen.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen.behave = well
        assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_an_empty_file(reader: Reader, tmp_path: Path, url: str) -> None:
    publish(tmp_path / "weights", 8, {"empty.bin": b""})
    assert (await reader(url).file(8, "empty.bin")).read_bytes() == b""


async def test_line_and_manifest(reader: Reader, tmp_path: Path, url: str) -> None:
    source = reader(url)
    line = await source.line()
    assert line.head == 7
    assert (await source.manifest(7)).files[NAME].size == SIZE
    waiting = asyncio.create_task(source.line(line, 30.0))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    publish(tmp_path / "weights", 8, {NAME: b"new"})
    async with asyncio.timeout(60):
        assert (await waiting).head == 8
    assert (await source.line(line, 30.0)).head == 8  # it is another one already
    assert (await source.line(await source.line(), 0.05)).head == 8


async def test_a_policy_without_versions_has_an_empty_line(tmp_path: Path, url: str) -> None:
    source = HttpSource(f"{url}/nobody", cache=tmp_path / "c", key=KEY, token=TOKEN)
    try:
        assert await source.line() == EMPTY
        assert await source.line(EMPTY, 0.05) == EMPTY
        with pytest.raises(WeightsError):
            await source.manifest(3)
    finally:
        await source.close()


async def test_what_is_not_there(reader: Reader, url: str) -> None:
    source = reader(url)
    with pytest.raises(WeightsError):
        await source.manifest(8)
    with pytest.raises(WeightsError):
        await source.file(7, "../../secret")


async def test_the_token_of_another_run(reader: Reader, url: str) -> None:
    with pytest.raises(Unauthorized):
        await reader(url, token="another").line()


async def test_the_runs_own_token_does_not_travel(reader: Reader, url: str) -> None:
    heads: list[bytes] = []

    async def listen(exchange: Exchange) -> None:
        heads.append(exchange._head)
        await exchange.pass_on()

    async with between(url, listen) as (middle, _):
        await reader(middle).file(7, NAME)
    assert heads
    assert not any(TOKEN.encode() in head for head in heads)


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
    monkeypatch.setattr(remote, "_FOLLOWED", 0.05)
    monkeypatch.setattr(remote, "_WAIT", 0.05)
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


# ---------------------------------------------------------------- several servers


async def test_the_nearest_is_used_and_the_next_when_it_dies(reader: Reader, tmp_path: Path, url: str) -> None:
    publish(tmp_path / "weights", 8, {NAME: DATA})
    async with served(tmp_path / "weights") as far, between(far, well) as (middle, _):
        source = reader(url, middle)
        as_given(source)
        await source.file(7, NAME)
        assert source.transfers[-1].sources == [url]
        near = source._mirrors._mirrors[0]
        near.url = url.rsplit(":", 1)[0] + ":1"  # no server listens there
        await source.file(8, NAME)
        assert source.transfers[-1].sources == [middle]
        assert (await source.line()).head == 8


async def test_the_nearest_is_measured(url: str, tmp_path: Path) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    slow = await asyncio.start_server(handle, "127.0.0.1", 0)
    distant = f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    found = servers.Mirrors([distant, "http://127.0.0.1:1", url], "x")
    try:
        order = await found.order()
        assert order.index(distant) < order.index("http://127.0.0.1:1")
    finally:
        await found.close()
        slow.close()


async def test_a_version_that_only_one_has(reader: Reader, tmp_path: Path, url: str) -> None:
    publish(tmp_path / "other", 9, {NAME: DATA})
    async with served(tmp_path / "other") as other:
        assert (await reader(url, other).file(9, NAME)).read_bytes() == DATA


# ---------------------------------------------------------------- disk


async def test_forgotten_versions_take_no_room(reader: Reader, tmp_path: Path, url: str) -> None:
    source = reader(url)
    path = await source.file(7, NAME)
    await source.forget(7)
    assert not path.parent.exists()
    await source.forget(99)
    assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_what_an_earlier_process_left_is_taken_away(reader: Reader, tmp_path: Path, url: str) -> None:
    old = reader.cache / "v00000003" / NAME
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(1000))
    source = reader(url)
    path = await source.file(7, NAME)
    await source.line()
    assert not old.parent.exists()
    assert path.exists()


async def test_the_cache_is_bounded(reader: Reader, tmp_path: Path, url: str) -> None:
    publish(tmp_path / "weights", 8, {NAME: DATA})
    before = await reader(url).file(7, NAME)  # of an earlier process: its lock is free
    source = reader(url, limit=SIZE + 1000)
    path = await source.file(8, NAME)
    assert path.exists()
    assert not before.exists()
    with pytest.raises(DiskFull):
        await source.file(7, NAME)  # there is only room for the one that is held
    await source.forget(8)
    assert (await source.file(7, NAME)).read_bytes() == DATA
