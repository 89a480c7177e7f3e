"""The file unit: what was put is got bit for bit, anything else is refused."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from rillflow.dataflow.units import GET_LIMIT, FileUnit
from rillflow.errors import BadRequest, CorruptData, DiskFull
from rillflow.types import Row


@pytest.fixture
def unit(tmp_path):
    unit = FileUnit(tmp_path / "units" / "0")
    yield unit
    unit.close()


def row(n=3):
    return {
        "tokens": np.arange(n, dtype="<i4").tobytes(),
        "mask": np.ones(n, dtype="|u1").tobytes(),
        "logprobs": np.linspace(-1, 0, n).astype("<f4").tobytes(),
        "versions": np.zeros(n, dtype="<i4").tobytes(),
        "transcript": b"[]",
    }


def test_round_trip_and_reopening(unit, tmp_path):
    places = unit.put([row(3), row(5)])
    assert unit.get(places, ["tokens", "mask"])[1] == {key: row(5)[key] for key in ("tokens", "mask")}
    assert unit.get(places[:1], list(row())) == [row(3)]
    again = FileUnit(tmp_path / "units" / "0")
    assert again.info() == unit.info()
    assert again.get(places, ["transcript"]) == [{"transcript": b"[]"}] * 2
    assert again.get(again.put([row(4)]), ["tokens"]) == [{"tokens": row(4)["tokens"]}]
    again.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": b""}, "unknown columns"),
        ({"tokens": b"12345"}, "5 bytes"),
        ({"mask": b"\x01"}, "differ in length"),
        ({"temperatures": b"\0\0\0\0"}, "differ in length"),
    ],
)
def test_bad_columns_are_refused_before_anything_is_written(unit, tmp_path, change, message):
    with pytest.raises(BadRequest, match=message):
        unit.put([row(), row() | change])
    assert sum(path.stat().st_size for path in (tmp_path / "units" / "0").glob("*.seg")) == 0


def test_bad_reads_are_refused(unit):
    (place,) = unit.put([row()])
    with pytest.raises(BadRequest, match="unknown columns"):
        unit.get([place], ["tokens", "secrets"])
    other = Row(unit="other", segment=0, offset=0, length=8)
    with pytest.raises(BadRequest, match="not other"):
        unit.get([other], ["tokens"])
    for segment, offset, length in ((0, -1, 8), (-1, 0, 8), (0, 0, -8)):
        with pytest.raises(BadRequest):
            unit.get([Row(unit=place.unit, segment=segment, offset=offset, length=length)], ["tokens"])
    with pytest.raises(BadRequest, match="fewer rows"):
        unit.get([Row(unit=place.unit, segment=0, offset=0, length=GET_LIMIT + 1)], ["tokens"])
    for segment, offset, length in ((9, 0, 8), (0, 0, 4), (0, 4, place.length), (0, 1 << 40, 8)):
        with pytest.raises(CorruptData):
            unit.get([Row(unit=place.unit, segment=segment, offset=offset, length=length)], ["tokens"])


def test_a_flipped_bit_is_noticed(unit, tmp_path):
    (place,) = unit.put([row()])
    path = next((tmp_path / "units" / "0").glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData):
        unit.get([place], ["tokens"])


def test_a_full_disk_acknowledges_nothing_and_hurts_nothing(unit, monkeypatch):
    before = unit.put([row()])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.storage.segments.os.fsync", full)
        with pytest.raises(DiskFull):
            unit.put([row(7)])
    after = unit.put([row(9)])
    assert unit.get(before + after, ["tokens"]) == [{"tokens": row(n)["tokens"]} for n in (3, 9)]
