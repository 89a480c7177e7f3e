"""Weights over HTTP come whole, whatever the network and the servers do, and nothing is fetched twice for nothing."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from http_reader import DATA, NAME, SIZE, Reader, as_given
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import CorruptData, DiskFull, Unauthorized, WeightsError
from rillflow.types import Probe
from rillflow.weights.pull import Puller
from rillflow.weights.store import FolderStore
from rillflow.weights.transport import download as downloads
from rillflow.weights.transport import mirrors as servers
from rillflow.weights.transport.cache import Spans
from rillflow.weights.transport.download import piece_size
from rillflow.weights.transport.sources import EMPTY, HttpSource
from weight_servers import (
    KEY,
    POLICY,
    TOKEN,
    Exchange,
    between,
    publish,
    served,
    well,
)

pytestmark = pytest.mark.usefixtures("quick_retries")


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
        first = asyncio.create_task(source.file(7, NAME))
        await seen.asked.wait()
        second = asyncio.create_task(source.file(7, NAME))
        await asyncio.sleep(0)  # it knows the manifest, so it shares the download at once
        first.cancel()
        gate.set()
        assert (await second).read_bytes() == DATA


async def test_a_reader_may_come_while_the_download_of_the_last_one_ends(reader: Reader, url: str) -> None:
    async def never(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    async with between(url, never) as (middle, seen):
        source = reader(middle)
        first = asyncio.create_task(source.file(7, NAME))
        await seen.asked.wait()
        first.cancel()
        seen.behave = well
        second = asyncio.create_task(source.file(7, NAME))
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
