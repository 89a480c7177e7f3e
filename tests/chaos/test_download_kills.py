"""A process that is killed while it fetches weights leaves a part that the next one goes on from."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from weight_servers import Exchange, between, part_record, publish, served, some_bytes

pytestmark = pytest.mark.chaos

SIZE = 16_000_000
DATA = some_bytes(SIZE)
NAME = "model.bin"
TESTS = Path(__file__).parents[1]


async def _start(url: str, cache: Path) -> asyncio.subprocess.Process:
    script = str(Path(__file__).with_name("pulling_process.py"))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, script, url, str(cache), "7", NAME),
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=asyncio.subprocess.PIPE,
    )


async def test_a_killed_download_goes_on(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 7, {NAME: DATA})
    cache = tmp_path / "cache"

    async def slowly(exchange: Exchange) -> None:
        head, body = await exchange.answer()
        await exchange.send(head)
        for at in range(0, len(body), 50_000):
            await exchange.send(body[at : at + 50_000])
            await asyncio.sleep(0.02)

    there = 0
    async with served(tmp_path / "weights") as origin, between(origin, slowly) as (url, _):
        for _ in range(3):
            process = await _start(url, cache)
            async with asyncio.timeout(60):
                while _there(cache) < there + 1_500_000:
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            assert _there(cache) > there
            there = _there(cache)
        last = await _start(url, cache)
        async with asyncio.timeout(120):
            fetched, _ = await last.communicate()
    assert last.returncode == 0
    assert int(fetched) == SIZE - there
    assert (cache / "v00000007" / NAME).read_bytes() == DATA


def _there(cache: Path) -> int:
    return sum(end - start for start, end in part_record(cache, 7, NAME))
