"""The file unit: its name, its report on the disk, and damage on that disk."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from rillflow.clients.unit_directory import GET_LIMIT
from rillflow.clients.units import LocalWriter
from rillflow.dataflow.storage_unit import FileUnit, Growth
from rillflow.errors import BadRequest, CorruptData, DiskFull, StorageError
from rillflow.storage import SegmentWriter
from rillflow.storage.segments import segment_numbers


@pytest.fixture
def unit(tmp_path):
    unit = FileUnit(tmp_path / "units" / "7", "7", segment_bytes=1 << 16)
    yield unit
    unit.close()


def row(n=3):
    return {"tokens": np.arange(n, dtype="<i4"), "mask": np.ones(n, dtype="|u1")}


def test_info_tells_name_folder_and_room(unit, tmp_path):
    info = unit.info()
    assert info.unit.startswith("7-")
    assert info.path == str(tmp_path / "units" / "7")
    assert info.kind == "files"
    assert info.durability == "process"
    disk = os.statvfs(tmp_path)
    assert 0 < info.free <= disk.f_blocks * disk.f_frsize
    other = FileUnit(tmp_path / "units" / "8", "7")
    assert other.info().unit != info.unit
    other.close()


def test_bad_rows_leave_nothing_behind(unit, tmp_path):
    with pytest.raises(BadRequest):
        unit.put([row(), {"tokens": b"12345"}])
    assert segment_numbers(tmp_path / "units" / "7") == []


def test_who_writes_beside_the_unit_is_read_by_it_and_not_dropped_by_it(unit, tmp_path):
    beside = LocalWriter(tmp_path / "units" / "7")
    places = beside.put([row()]) + unit.put([row()])
    assert len({place.segment for place in places}) == 2
    unit.drop([place.segment for place in places])
    assert unit.remaining([0, 1, 2]) == [0, 1]
    assert len(unit.get(places, ["mask"])) == 2
    beside.close()
    unit.drop([0, 1])
    assert unit.remaining([0, 1]) == [places[1].segment]


def test_ranges_have_bounds(unit):
    (place,) = unit.put([row()])
    assert len(unit.read_range(0, 0, place.length)) == place.length
    for start, end in ((-8, 8), (8, 8), (8, 0), (0, GET_LIMIT + 1)):
        with pytest.raises(BadRequest):
            unit.read_range(0, start, end)
    for segment, end in ((1, 8), (0, 1 << 17)):
        with pytest.raises(CorruptData):
            unit.read_range(segment, 0, end)


def test_a_full_disk_acknowledges_nothing_and_hurts_nothing(unit, monkeypatch):
    before = unit.put([row()])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.storage.segments.os.pwritev", full)
        with pytest.raises(DiskFull):
            unit.put([row(7)])
    after = unit.put([row(9)])
    assert unit.get(before + after, ["tokens"]) == [{"tokens": row(n)["tokens"].tobytes()} for n in (3, 9)]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        FileUnit(tmp_path / "file" / "unit")


def test_growth_counts_what_anybody_writes(tmp_path):
    first = SegmentWriter(tmp_path, 1 << 20)
    first.write([{"a": os.urandom(100_000)}])
    growth = Growth(tmp_path)
    assert growth.count() == 0  # it was there before
    second = SegmentWriter(tmp_path, 1 << 20)
    for writer in (first, second):
        writer.write([{"a": os.urandom(200_000)}])
    assert 400_000 <= growth.count() <= 420_000
    assert 400_000 <= growth.count() <= 420_000
    for writer in (first, second):
        writer.close()
    assert 400_000 <= growth.count() <= 420_000
    (tmp_path / "00000000.seg").unlink()
    assert 400_000 <= growth.count() <= 420_000
