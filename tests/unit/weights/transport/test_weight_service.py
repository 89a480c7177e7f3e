"""The weight server gives what is in its folder, by ranges and in time, and nothing else."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from raw_http import connected, exchanged
from rillflow.weights.transport import serve
from rillflow.wire.messages import Stream
from weight_servers import POLICY, READING, publish, served, some_bytes

DATA = some_bytes(3_000_000)
PATH = f"/weights/{POLICY}/7/model.bin"
BEARER = {"authorization": f"Bearer {READING}"}


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    publish(tmp_path / "weights", 7, {"model.bin": DATA})
    async with served(tmp_path / "weights") as url:
        yield url


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, headers=BEARER) as session:
        yield session


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        ("bytes=2999990-", (2999990, 3000000)),
        ("bytes=-7", (2999993, 3000000)),
        ("bytes=100-99999999", (100, 3000000)),
        ("bytes=-99999999", (0, 3000000)),
    ],
)
async def test_ranges(http: aiohttp.ClientSession, asked: str, expected: tuple[int, int]) -> None:
    async with http.get(PATH, headers={"range": asked}) as response:
        assert response.status == 206
        assert await response.read() == DATA[slice(*expected)]
        assert response.headers["content-range"] == f"bytes {expected[0]}-{expected[1] - 1}/{len(DATA)}"


@pytest.mark.parametrize(
    "asked", ["", "bytes=1-2,4-5", "bytes=-", "lines=1-2", "bytes=5-2x", "bytes=" + "9" * 40 + "-"]
)
async def test_what_is_no_range_gets_the_whole(http: aiohttp.ClientSession, asked: str) -> None:
    async with http.get(PATH, headers={"range": asked}) as response:
        assert response.status == 200
        assert await response.read() == DATA
        assert "immutable" in response.headers["cache-control"]
        assert "private" in response.headers["cache-control"]  # no cache gives it to who has no token


@pytest.mark.parametrize("asked", ["bytes=3000000-", "bytes=9-3", "bytes=-0"])
async def test_a_range_that_is_not_there(http: aiohttp.ClientSession, asked: str) -> None:
    async with http.get(PATH, headers={"range": asked}) as response:
        assert response.status == 416


async def test_head_and_if_range(http: aiohttp.ClientSession) -> None:
    async with http.head(PATH) as response:
        assert (response.status, response.headers["content-length"]) == (200, str(len(DATA)))
        tag = response.headers["etag"]
    for condition, status in ((tag, 206), ('"another"', 200)):
        async with http.get(PATH, headers={"range": "bytes=0-9", "if-range": condition}) as response:
            assert response.status == status


@pytest.mark.parametrize(
    "path",
    [
        "/weights/../secret",
        f"/weights/{POLICY}/7/../../../secret",
        f"/weights/{POLICY}/7/..%2f..%2f..%2fsecret",
        "/weights/%2e%2e/7/model.bin",
        f"/weights/{POLICY}/7/.hidden",
        f"/weights/{POLICY}/7/link",
        f"/weights/{POLICY}/7/folder",
        f"/weights/{POLICY}/7/pipe",
        f"/weights/{POLICY}/8/model.bin",
        f"/weights/{POLICY}/7/%00",
        f"/weights/{POLICY}/7/" + "a" * 300,
        "/weights/linked/7/model.bin",
        "/weights/linked/line",
        "/weights/linked/7/manifest.json",
        f"/weights/{POLICY}/9/model.bin",
    ],
)
async def test_nothing_outside_is_read(tmp_path: Path, url: str, path: str) -> None:
    store = tmp_path / "weights" / POLICY
    (tmp_path / "secret").write_text("secret")
    (store / "v00000007" / ".hidden").write_text("secret")
    (store / "v00000007" / "link").symlink_to(tmp_path / "secret")
    (store / "v00000007" / "folder").mkdir()
    os.mkfifo(store / "v00000007" / "pipe")
    (store / "v00000009").symlink_to(store / "v00000007")
    (tmp_path / "weights" / "linked").symlink_to(store)
    head = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {BEARER['authorization']}\r\n\r\n"
    answer = await exchanged(url, head.encode())
    assert answer.startswith(b"HTTP/1.1 404"), answer
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2].replace(b"/secret", b"")


async def test_waiting_for_the_line(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    path = f"/weights/{POLICY}/line"
    async with http.get(path) as response:
        tag, line = response.headers["etag"].strip('"'), await response.read()
    assert line == (tmp_path / "weights" / POLICY / "head.json").read_bytes()
    async with http.get(f"{path}?known={tag}&wait=0.05") as response:
        assert response.status == 304
    waiting = [asyncio.create_task(_line(http, f"{path}?known={tag}&wait=30")) for _ in range(20)]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in waiting)
    publish(tmp_path / "weights", 8, {"model.bin": b"new"})
    async with asyncio.timeout(60):
        assert all(b'"head":8' in got for got in await asyncio.gather(*waiting))


async def _line(http: aiohttp.ClientSession, path: str) -> bytes:
    async with http.get(path) as response:
        return await response.read()


@pytest.mark.parametrize("wait", ["-1", "nan", "1e9", "soon"])
async def test_waits_are_bounded(http: aiohttp.ClientSession, wait: str) -> None:
    async with http.get(f"/weights/{POLICY}/line?wait={wait}") as response:
        assert response.status == 400


async def test_a_policy_that_has_published_nothing(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with http.get("/weights/other/line") as response:
        assert response.status == 404
    waiting = asyncio.create_task(_line(http, "/weights/other/line?known=none&wait=30"))
    await asyncio.sleep(0.1)
    publish(tmp_path / "weights", 0, {"model.bin": b"first"}, policy="other")
    async with asyncio.timeout(60):
        assert b'"head":0' in await waiting


async def test_a_version_that_is_removed_is_read_to_its_end(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    from rillflow.weights import sealed

    async with http.get(PATH) as response:
        first = await response.content.readexactly(1000)
        sealed.remove(tmp_path / "weights" / POLICY / "v00000007")
        assert first + await response.read() == DATA


async def test_a_reader_that_takes_nothing_is_cut_off(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path / "weights", 8, {"model.bin": bytes(64 << 20)})
    monkeypatch.setattr(Stream, "stalled", 0.2)
    async with connected(url) as line:
        auth = f"host: x\r\nauthorization: {BEARER['authorization']}"
        line.send(f"GET /weights/{POLICY}/8/model.bin HTTP/1.1\r\n{auth}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            while "has read nothing" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len(await line.all()) < 64 << 20


async def test_many_readers_at_once(http: aiohttp.ClientSession) -> None:
    got = await asyncio.gather(*(_line(http, PATH) for _ in range(50)))
    assert all(data == DATA for data in got)
    async with http.get("/metrics") as response:
        text = await response.text()
    (sent,) = re.findall(rf'rillflow_weights_sent_bytes_total{{policy="{POLICY}"}} (\S+)', text)
    assert float(sent) == 50 * len(DATA)


async def test_transfers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "weights", 7, {"model.bin": bytes(64 << 20)})
    monkeypatch.setattr(serve, "TRANSFERS", 2)
    async with served(tmp_path / "weights") as url, aiohttp.ClientSession(url, headers=BEARER) as http:
        held = [await http.get(PATH) for _ in range(2)]  # they have begun, and take nothing yet
        async with http.get(PATH) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "1")
        for one in held:
            one.close()
        async with asyncio.timeout(60):
            while (await _status(http, PATH)) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def _status(http: aiohttp.ClientSession, path: str) -> int:
    async with http.head(path) as response:
        return response.status
