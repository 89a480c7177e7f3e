"""A relay is killed, frozen or out of disk while nodes fetch through it: they get the weights whole all the same."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forwarder import forwarder
from rillflow.weights.transport.sources import HttpSource
from small_disk import small_disk
from weight_servers import KEY, POLICY, READING, TOKEN, publish, served, some_bytes

pytestmark = pytest.mark.chaos

SIZE = 6_000_000
DATA = some_bytes(SIZE)
NAME = "model.bin"
RATE = 500_000.0  # bytes a second of each of a reader's connections: a download takes some seconds


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publish(tmp_path / "weights", 7, {NAME: DATA})
    return tmp_path / "weights"


class Relay:
    """`rillflow relay` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, url: str) -> None:
        self.process = process
        self.log = log
        self.url = url


@asynccontextmanager
async def relay(origin: str, cache: Path) -> AsyncIterator[Relay]:
    log = cache.with_name(f"{cache.name}.log")
    command = (sys.executable, "-m", "rillflow", "relay", "--upstream", origin, "--cache", str(cache), "--limit", "1")
    with open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env=os.environ | {"RILLFLOW_WEIGHTS_TOKEN": READING}
        )
    try:
        await until(lambda: re.search(r"http://127\.0\.0\.1:\d+(?=, cache)", log.read_text()), "the relay")
        yield Relay(process, log, re.findall(r"http://127\.0\.0\.1:\d+(?=, cache)", log.read_text())[0])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(condition: Callable[[], object], what: str, seconds: float = 180.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - another process sends no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {seconds} s for {what}") from None


@asynccontextmanager
async def reading(cache: Path, *urls: str) -> AsyncIterator[HttpSource]:
    """A node's own downloads; the first server is the nearest."""
    source = HttpSource(f"{','.join(urls)}/{POLICY}", cache=cache, key=KEY, token=TOKEN, patience=180.0, stall=1.0)
    source._mirrors._probing = asyncio.create_task(asyncio.sleep(0))
    try:
        yield source
    finally:
        await source.close()


async def test_a_relay_that_is_killed_is_gone_on_with_when_it_is_back(tmp_path: Path, store: Path) -> None:
    async with served(store) as origin, forwarder(origin) as upstream, forwarder(origin) as near:
        near.rate = RATE
        async with reading(tmp_path / "node", near.url) as source:
            async with relay(upstream.url, tmp_path / "cache") as first:
                near.upstream = first.url
                got = asyncio.create_task(source.file(7, NAME))
                await until(lambda: near.carried > SIZE // 4, "a part of the file")
                first.process.kill()
                await first.process.wait()
            assert not got.done()
            async with relay(upstream.url, tmp_path / "cache") as second:
                near.upstream = second.url
                assert (await asyncio.wait_for(got, 180)).read_bytes() == DATA
        assert source.transfers[0].bytes == SIZE  # none came twice
        assert upstream.carried < 1.5 * SIZE  # nor over the long way


async def test_a_frozen_relay_is_left_for_the_next_server(tmp_path: Path, store: Path) -> None:
    async with (
        served(store) as origin,
        relay(origin, tmp_path / "cache") as frozen,
        forwarder(frozen.url) as near,
        reading(tmp_path / "node", near.url, origin) as source,
    ):
        near.rate = RATE
        got = asyncio.create_task(source.file(7, NAME))
        await until(lambda: near.carried > SIZE // 4, "a part of the file")
        frozen.process.send_signal(signal.SIGSTOP)
        near.stall()  # bytes in flight are lost, too
        assert (await asyncio.wait_for(got, 180)).read_bytes() == DATA
        assert source.transfers[0].bytes < SIZE + SIZE // 4
        frozen.process.send_signal(signal.SIGCONT)
        near.mend()
        async with reading(tmp_path / "other", near.url) as again:
            assert (await again.file(7, NAME)).read_bytes() == DATA


@pytest.mark.needs("mounts")
async def test_a_relay_without_room_says_so_and_nodes_go_to_the_next_server(tmp_path: Path, store: Path) -> None:
    with small_disk(tmp_path / "cache", "2m") as cache:
        async with (
            served(store) as origin,
            relay(origin, cache) as full,
            reading(tmp_path / "node", full.url, origin) as source,
        ):
            assert (await asyncio.wait_for(source.file(7, NAME), 180)).read_bytes() == DATA
            assert full.process.returncode is None
            assert "has no room for" in full.log.read_text()
