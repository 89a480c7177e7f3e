"""kill -9 of a storage unit's process in the middle of puts: no acknowledged row is lost, with either durability."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rillflow.clients.unit_directory import UnitClient
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.errors import RillflowError
from rillflow.types import Row

UNIT = """
import asyncio, sys
from pathlib import Path
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.dataflow.storage_unit import UnitService
from rillflow.types import UnitBeatReply

async def beat(news):
    return UnitBeatReply(drop=[])

async def serve():
    unit = FileUnit(Path(sys.argv[1]), segment_bytes=1 << 18, durability=sys.argv[2])
    print(await UnitService(unit, "secret", beat).start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


async def put_until_it_dies(client: UnitClient, first: int, acknowledged: list[tuple[int, Row]]) -> None:
    value = first
    while True:
        try:
            (row,) = await client.put_rows([{"tokens": np.full(500 + value % 900, value, "<i4").tobytes()}], 60)
        except RillflowError:
            return
        acknowledged.append((value, row))
        value += 8


@pytest.mark.parametrize("durability", ["process", "machine"])
async def test_kill_9_of_a_unit_loses_nothing_that_it_acknowledged(tmp_path: Path, durability: Any) -> None:
    command = [sys.executable, "-c", UNIT, str(tmp_path), durability]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = (await asyncio.to_thread(process.stdout.readline)).strip()
    acknowledged: list[tuple[int, Row]] = []
    client = UnitClient(url, "secret")
    puts = [asyncio.create_task(put_until_it_dies(client, first, acknowledged)) for first in range(8)]
    async with asyncio.timeout(60):
        while len(acknowledged) < 200:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
    process.kill()
    await asyncio.gather(*puts)
    await client.close()
    process.wait(60)
    process.stdout.close()
    unit = FileUnit(tmp_path)  # as the next process opens it
    found = unit.get([row for _, row in acknowledged], ["tokens"])
    unit.close()
    assert len({row.segment for _, row in acknowledged}) > 1
    for (value, _), columns in zip(acknowledged, found, strict=True):
        np.testing.assert_array_equal(np.frombuffer(columns["tokens"], "<i4"), np.full(500 + value % 900, value))
