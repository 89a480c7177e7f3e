"""Payload reads: mapped where the unit is on this host, over the wire where it is not; the same bits either way."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from rillflow.clients.payloads import PayloadReader
from rillflow.dataflow.units import FileUnit
from rillflow.errors import BadRequest, CorruptData
from rillflow.types import COLUMNS, GetRows, Row, RowsGot, UnitInfo
from rillflow.wire import Client, Service

TOKEN = "secret"


@pytest.fixture
async def unit_at(tmp_path):
    unit = FileUnit(tmp_path / "unit")
    service = Service("unit", TOKEN)
    told = {"path": None}

    async def info() -> UnitInfo:
        found = unit.info()
        return found if told["path"] is None else UnitInfo(unit=found.unit, path=told["path"])

    async def get(body: GetRows) -> RowsGot:
        return RowsGot(rows=unit.get(body.rows, body.columns))

    service.get("/unit/info", info)
    service.post("/unit/get", get, GetRows)
    client = Client(await service.start(), TOKEN)
    yield unit, client, told
    await client.close()
    await service.stop()
    unit.close()


def row(n: int) -> dict[str, bytes]:
    return {name: np.arange(n).astype(dtype).tobytes() for name, dtype in COLUMNS.items() if name != "transcript"}


async def test_mapped_and_remote_reads_are_the_same(unit_at):
    unit, client, _ = unit_at
    rows = unit.put([row(n) for n in range(1, 200)])
    mapped, remote = PayloadReader(client), PayloadReader(client, allow_map=False)
    names = ["tokens", "logprobs", "versions"]
    near, far = await mapped.read(rows, names), await remote.read(rows, names)
    assert (mapped.mapped, remote.mapped) == (True, False)
    for n, (one, other) in enumerate(zip(near, far, strict=True), start=1):
        assert list(one) == list(other) == names
        for name in names:
            assert one[name].dtype == np.dtype(COLUMNS[name])
            np.testing.assert_array_equal(one[name], np.arange(n).astype(COLUMNS[name]))
            np.testing.assert_array_equal(one[name], other[name])
    assert not near[0]["tokens"].flags.owndata
    assert not near[0]["tokens"].flags.writeable


async def test_a_mapped_reader_follows_a_growing_unit(unit_at):
    unit, client, _ = unit_at
    reader = PayloadReader(client)
    for n in (1, 2, 3):
        (found,) = await reader.read(unit.put([row(n)]), ["tokens"])
        assert len(found["tokens"]) == n


async def test_columns_that_a_row_lacks_are_left_out(unit_at):
    unit, client, _ = unit_at
    rows = unit.put([row(2), row(2) | {"transcript": b"[]"}])
    first, second = await PayloadReader(client).read(rows, ["tokens", "transcript"])
    assert "transcript" not in first
    assert second["transcript"].tobytes() == b"[]"


async def test_long_rows_are_read_in_calls_that_the_unit_allows(unit_at, monkeypatch):
    unit, client, _ = unit_at
    rows = unit.put([row(n) for n in (1, 900, 900, 900, 1, 2)])
    limit = 2 * rows[1].length + 1
    monkeypatch.setattr("rillflow.dataflow.units.GET_LIMIT", limit)
    monkeypatch.setattr("rillflow.clients.payloads.GET_LIMIT", limit, raising=False)
    found = await PayloadReader(client, allow_map=False).read(rows, ["tokens"])
    assert [len(one["tokens"]) for one in found] == [1, 900, 900, 900, 1, 2]
    assert await PayloadReader(client, allow_map=False).read([], ["tokens"]) == []


@pytest.mark.parametrize("other", ["missing", "another"])
async def test_a_folder_that_is_not_the_unit_is_not_mapped(unit_at, tmp_path, other):
    unit, client, told = unit_at
    if other == "another":
        FileUnit(tmp_path / "another").close()
    told["path"] = str(tmp_path / other)
    reader = PayloadReader(client)
    (found,) = await reader.read(unit.put([row(3)]), ["tokens"])
    assert not reader.mapped
    assert len(found["tokens"]) == 3


async def test_damage_is_noticed_on_either_way(unit_at, tmp_path):
    unit, client, _ = unit_at
    rows = unit.put([row(3)])
    path = next(Path(tmp_path / "unit").glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[40] ^= 255
    path.write_bytes(data)
    for allow_map in (True, False):
        with pytest.raises(CorruptData):
            await PayloadReader(client, allow_map=allow_map).read(rows, ["tokens"])


async def test_rows_of_another_unit_are_refused(unit_at):
    _, client, _ = unit_at
    with pytest.raises(BadRequest):
        await PayloadReader(client).read([Row(unit="x", segment=0, offset=0, length=1)], ["tokens"])


def test_clients_do_not_load_the_loops():
    """Trainers import the clients; the ledger must not come with them."""
    import subprocess

    code = "import rillflow.clients.dataflow, rillflow.clients.payloads, sys; print('rillflow.dataflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
