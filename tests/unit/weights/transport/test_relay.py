"""A relay fetches each file once, passes it on as it comes, keeps it within its bound, and works alone."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from rillflow.errors import CorruptData, Unavailable
from rillflow.weights.transport import download as downloads
from rillflow.weights.transport import following, relay
from rillflow.weights.transport import mirrors as servers
from rillflow.weights.transport.relay import RelayService, RelayShelf
from rillflow.weights.transport.sources import HttpSource
from weight_servers import KEY, POLICY, READING, TOKEN, Exchange, between, publish, served, some_bytes, well

SIZE = 3_000_000
DATA = some_bytes(SIZE)
NAME = "model.bin"
LONG = 32 << 20  # more than lies in the buffers of a connection
PATH = f"/weights/{POLICY}/7/{NAME}"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(downloads, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(servers, "_FIRST_REST", 0.05)
    monkeypatch.setattr(following, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(following, "_LONGEST_PAUSE", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publish(tmp_path / "weights", 7, {NAME: DATA})
    return tmp_path / "weights"


@asynccontextmanager
async def relayed(
    upstream: str, cache: Path, limit: int | None = None, patience: float = 20.0
) -> AsyncIterator[tuple[str, RelayShelf]]:
    shelf = RelayShelf([upstream], READING, cache, limit, streams=4, patience=patience, stall=5.0)
    service = RelayService(shelf, READING)
    url = await service.start()
    try:
        yield url, shelf
    finally:
        await service.stop()


@asynccontextmanager
async def reading(url: str, cache: Path) -> AsyncIterator[HttpSource]:
    source = HttpSource(f"{url}/{POLICY}", cache=cache, key=KEY, token=TOKEN, patience=20.0)
    try:
        yield source
    finally:
        await source.close()


def client(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, headers={"authorization": f"Bearer {READING}"})


async def test_many_readers_cost_upstream_one_download(tmp_path: Path, store: Path) -> None:
    async with (
        served(store) as origin,
        between(origin, well) as (upstream, seen),
        relayed(upstream, tmp_path / "relay") as (url, shelf),
    ):

        async def read(number: int) -> bytes:
            async with reading(url, tmp_path / f"reader-{number}") as source:
                assert (await source.line()).head == 7
                return (await source.file(7, NAME)).read_bytes()

        assert set(await asyncio.gather(*(read(n) for n in range(8)))) == {DATA}
        assert shelf.fetched == SIZE
        asked = [one.range for one in seen.files]
        assert sum(end - start for start, end in filter(None, asked)) == SIZE
        async with reading(url, tmp_path / "later") as source:
            assert (await source.file(7, NAME)).read_bytes() == DATA
        assert len(seen.files) == len(asked)


async def test_a_reader_does_not_wait_for_the_whole_file(tmp_path: Path, store: Path) -> None:
    rest = asyncio.Event()

    async def first_bytes_first(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + body[:300_000])
        await rest.wait()
        await exchange.send(body[300_000:])

    async with (
        served(store) as origin,
        between(origin, first_bytes_first) as (upstream, _),
        relayed(upstream, tmp_path / "relay") as (url, _),
        client(url) as http,
        http.get(PATH) as response,
    ):
        async with asyncio.timeout(60):
            first = await response.content.readexactly(250_000)
        assert not rest.is_set()
        rest.set()
        assert first + await response.read() == DATA


async def test_where_readers_wait_is_fetched_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_MOST_PIECE", 100_000)
    publish(tmp_path / "weights", 7, {NAME: DATA})
    wanted = asyncio.Event()

    async def slowly(exchange: Exchange) -> None:
        await wanted.wait()
        await exchange.pass_on()

    async with (
        served(tmp_path / "weights") as origin,
        between(origin, slowly) as (upstream, seen),
        relayed(upstream, tmp_path / "relay") as (url, shelf),
        client(url) as http,
    ):
        whole = asyncio.create_task(_get(http, PATH))
        await seen.asked.wait()
        last = asyncio.create_task(_get(http, PATH, f"bytes={SIZE - 1000}-"))
        (flight,) = shelf._flights.values()
        async with asyncio.timeout(60):
            while SIZE - 1000 not in flight.download._wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        wanted.set()
        assert await last == DATA[-1000:]
        assert await whole == DATA
    starts = [one.range[0] for one in seen.files if one.range]
    assert starts.index(SIZE - 1000) < len(starts) // 2


async def _get(http: aiohttp.ClientSession, path: str, part: str = "") -> bytes:
    async with http.get(path, headers={"range": part} if part else {}) as response:
        assert response.status in (200, 206), response.status
        return await response.read()


async def test_news_of_the_line_pass_through(tmp_path: Path, store: Path) -> None:
    async with (
        served(store) as origin,
        relayed(origin, tmp_path / "relay") as (url, _),
        reading(url, tmp_path / "a") as source,
    ):
        line = await source.line()
        waiting = [asyncio.create_task(source.line(line, 30.0)) for _ in range(5)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        publish(store, 8, {NAME: DATA})
        async with asyncio.timeout(60):
            assert {one.head for one in await asyncio.gather(*waiting)} == {8}


async def test_a_policy_that_publishes_later(tmp_path: Path) -> None:
    async with (
        served(tmp_path / "weights") as origin,
        relayed(origin, tmp_path / "relay") as (url, _),
        reading(url, tmp_path / "a") as source,
    ):
        empty = await source.line()
        assert empty.head is None
        waiting = asyncio.create_task(source.line(empty, 30.0))
        await asyncio.sleep(0.1)
        publish(tmp_path / "weights", 0, {NAME: b"first"})
        async with asyncio.timeout(60):
            assert (await waiting).head == 0


async def test_it_works_while_upstream_is_away_also_after_a_restart(tmp_path: Path, store: Path) -> None:
    async with (
        served(store) as origin,
        relayed(origin, tmp_path / "relay") as (url, _),
        reading(url, tmp_path / "a") as source,
    ):
        await source.line()
        await source.file(7, NAME)
    async with relayed(origin, tmp_path / "relay", patience=0.2) as (url, _):  # no server listens upstream
        async with reading(url, tmp_path / "b") as source:
            assert (await source.line()).head == 7
            assert (await source.file(7, NAME)).read_bytes() == DATA
        async with client(url) as http:
            async with http.get(f"/weights/{POLICY}/line") as response:
                assert response.headers["x-rillflow-upstream"] == "away"
                assert response.headers["x-rillflow-age"] == "unknown"
            async with http.get(f"/weights/{POLICY}/8/manifest.json") as response:
                assert response.status == 503
            async with http.get("/weights/never-heard-of/line") as response:
                assert response.status == 503


async def test_upstream_that_goes_and_comes(tmp_path: Path, store: Path) -> None:
    async with (
        served(store) as origin,
        between(origin, well) as (upstream, seen),
        relayed(upstream, tmp_path / "relay") as (url, _),
        client(url) as http,
    ):
        assert "x-rillflow-upstream" not in await _notes(http)
        real, seen._upstream = seen._upstream, 1
        publish(store, 8, {NAME: DATA})
        async with asyncio.timeout(30):
            while "x-rillflow-upstream" not in await _notes(http):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        seen._upstream = real
        async with asyncio.timeout(30):
            while "x-rillflow-upstream" in await _notes(http):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert b'"head":8' in await _get(http, f"/weights/{POLICY}/line")


async def _notes(http: aiohttp.ClientSession) -> set[str]:
    async with http.get(f"/weights/{POLICY}/line") as response:
        return {name.lower() for name in response.headers}


async def test_a_download_that_broke_off_goes_on(tmp_path: Path, store: Path) -> None:
    async def cut(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + body[:200_000])

    async with (
        served(store) as origin,
        between(origin, cut) as (upstream, _),
        relayed(upstream, tmp_path / "relay") as (url, shelf),
        reading(url, tmp_path / "a") as source,
    ):
        assert (await source.file(7, NAME)).read_bytes() == DATA
        assert shelf.fetched == SIZE


async def test_lies_are_not_kept(tmp_path: Path, store: Path) -> None:
    async def lie(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + bytes([body[0] ^ 1]) + body[1:])

    async with (
        served(store) as origin,
        between(origin, lie) as (upstream, seen),
        relayed(upstream, tmp_path / "relay") as (url, _),
        reading(url, tmp_path / "a") as source,
    ):
        with pytest.raises(Exception, match=r"hash|reach|broke|bytes"):
            await source.file(7, NAME)
        assert not list((tmp_path / "relay").rglob(NAME))
        seen.behave = well
        async with asyncio.timeout(20):
            while not await _try(source):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _try(source: HttpSource) -> bool:
    try:
        return (await source.file(7, NAME)).read_bytes() == DATA
    except Exception:
        return False


async def test_what_its_disk_has_damaged_is_fetched_again(tmp_path: Path, store: Path) -> None:
    kept = tmp_path / "relay" / POLICY / "v00000007" / NAME
    async with served(store) as origin:
        async with relayed(origin, tmp_path / "relay") as (url, _), client(url) as http:
            await _get(http, PATH)
        assert kept.read_bytes() == DATA
        kept.write_bytes(bytes(SIZE))
        async with relayed(origin, tmp_path / "relay") as (url, _), client(url) as http:
            await _get(http, PATH)
            async with asyncio.timeout(20):
                while await _get(http, PATH) != DATA:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def _come(shelf: RelayShelf) -> None:
    """Until everything that was asked for is verified and in its place: readers have it before that."""
    async with asyncio.timeout(60):
        while shelf._flights:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_cache_is_bounded_and_keeps_what_is_read(tmp_path: Path, store: Path) -> None:
    for version in (8, 9):
        publish(store, version, {NAME: some_bytes(SIZE, version)})
    publish(store, 6, {NAME: bytes(LONG)})
    kept = {version: tmp_path / "relay" / POLICY / f"v{version:08d}" / NAME for version in (6, 8, 9)}
    async with (
        served(store) as origin,
        relayed(origin, tmp_path / "relay", LONG + SIZE + 100_000) as (url, shelf),
        client(url) as http,
    ):
        await _get(http, PATH.replace("/7/", "/6/"))
        await _come(shelf)
        async with http.get(PATH.replace("/7/", "/6/")) as response:  # it is being read
            await response.content.readexactly(1000)
            await _get(http, PATH.replace("/7/", "/8/"))
            await _come(shelf)
            assert await _get(http, PATH.replace("/7/", "/9/")) == some_bytes(SIZE, 9)
            await _come(shelf)
            assert {version for version, path in kept.items() if path.exists()} == {6, 9}
            await response.read()
        assert await _get(http, PATH.replace("/7/", "/8/")) == some_bytes(SIZE, 8)
        await _come(shelf)
        assert {version for version, path in kept.items() if path.exists()} == {8, 9}


async def test_a_file_that_nobody_waits_for_is_not_fetched_on(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "ABANDONED", 0.05)
    goes_on = asyncio.Event()

    async def stop_in_the_middle(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head + body[:300_000])
        await goes_on.wait()
        await exchange.send(body[300_000:])

    async with (
        served(store) as origin,
        between(origin, stop_in_the_middle) as (upstream, seen),
        relayed(upstream, tmp_path / "relay") as (url, shelf),
        client(url) as http,
    ):
        async with http.get(PATH) as response:
            await response.content.readexactly(1000)
            response.close()
        await _come(shelf)
        there = shelf.fetched
        assert 0 < there < SIZE
        goes_on.set()
        seen.behave = well
        assert await _get(http, PATH) == DATA
        assert shelf.fetched == SIZE


async def test_routes_and_names_are_those_of_the_server(tmp_path: Path, store: Path) -> None:
    async with served(store) as origin, relayed(origin, tmp_path / "relay") as (url, _), client(url) as http:
        for path, status in (
            (f"/weights/{POLICY}/8/{NAME}", 404),
            (f"/weights/{POLICY}/7/other.bin", 404),
            (f"/weights/{POLICY}/7/..%2f..%2fline.json", 404),
            ("/weights/%2e%2e/7/model.bin", 404),
            (PATH, 200),
        ):
            async with http.get(path) as response:
                assert response.status == status, path
        async with http.get(PATH, headers={"range": "bytes=5-9"}) as response:
            assert (response.status, await response.read()) == (206, DATA[5:10])
            assert response.headers["etag"] == f'"{hashlib.sha256(DATA).hexdigest()[:32]}"'
        async with http.head(PATH) as response:
            assert response.headers["content-length"] == str(SIZE)
    async with (
        served(store) as origin,
        relayed(origin, tmp_path / "relay") as (url, _),
        aiohttp.ClientSession(url) as http,
        http.get(PATH) as response,
    ):
        assert response.status == 401


async def test_relays_of_relays(tmp_path: Path, store: Path) -> None:
    async with (
        served(store) as origin,
        relayed(origin, tmp_path / "one") as (first, _),
        relayed(first, tmp_path / "two") as (second, _),
        reading(second, tmp_path / "a") as source,
    ):
        assert (await source.line()).head == 7
        assert (await source.file(7, NAME)).read_bytes() == DATA


async def test_a_version_that_was_written_again(tmp_path: Path, store: Path) -> None:
    """A trainer that starts again does so with a version that it finds damaged."""
    async with served(store) as origin, relayed(origin, tmp_path / "relay") as (url, shelf):
        async with reading(url, tmp_path / "a") as source:
            line = await source.line()
            await source.file(7, NAME)
            await _come(shelf)
            shutil.rmtree(store / POLICY / "v00000007")
            publish(store, 7, {NAME: DATA[:1000], "other.bin": DATA})
            assert await source.line(line, wait=20) != line
        async with reading(url, tmp_path / "b") as source:
            await source.line()
            assert (await source.file(7, NAME)).read_bytes() == DATA[:1000]
            assert (await source.file(7, "other.bin")).read_bytes() == DATA


async def test_an_upstream_that_answers_nonsense_is_left_for_another(tmp_path: Path, store: Path) -> None:
    shutil.copytree(store, tmp_path / "damaged")
    (tmp_path / "damaged" / POLICY / "head.json").write_bytes(b"{}")
    (tmp_path / "damaged" / POLICY / "v00000007" / "manifest.json").write_bytes(b"{}")
    async with served(tmp_path / "damaged") as bad, served(store) as good:
        shelf = RelayShelf([bad, good], READING, tmp_path / "relay")
        shelf._mirrors._probing = asyncio.create_task(asyncio.sleep(0))  # the first counts as the nearest
        try:
            async with asyncio.timeout(20):
                with pytest.raises(CorruptData):
                    await shelf.manifest(POLICY, 7)
                assert hashlib.sha256(await shelf.manifest(POLICY, 7)).digest()
                shelf._mirrors.answered(bad)
                while not (await _line(shelf)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            await shelf.close()


async def _line(shelf: RelayShelf) -> bytes:
    try:
        return (await shelf.line(POLICY, "", 0.0)).data
    except Unavailable:
        return b""


async def test_a_line_goes_on_when_it_cannot_be_kept(tmp_path: Path, store: Path) -> None:
    (tmp_path / "relay").mkdir()
    (tmp_path / "relay" / POLICY).write_bytes(b"")  # no folder can be made here
    async with (
        served(store) as origin,
        relayed(origin, tmp_path / "relay") as (url, _),
        reading(url, tmp_path / "a") as source,
    ):
        line = await source.line()
        assert line.head == 7
        publish(store, 8, {NAME: DATA})
        assert (await source.line(line, wait=20)).head == 8
