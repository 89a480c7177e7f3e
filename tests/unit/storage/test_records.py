"""Records: sealed bytes are read bit for bit, as views; any other bytes raise CorruptData."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import CorruptData
from rillflow.storage.records import Place, Views, read_record, seal

BYTES = np.dtype("|u1")
tables = st.dictionaries(st.text(min_size=1, max_size=20), st.binary(max_size=100), max_size=8)


def written(columns, segment=3, offset=16):
    record = seal(columns)
    data = record.start(segment, offset) + b"".join(bytes(part) for part in record.buffers)
    assert len(data) == record.length
    return data, Place(segment, offset, record.length)


def read(data, place, names, at=0):
    views = Views(data, dict.fromkeys(names, BYTES))
    return {name: one.tobytes() for name, one in read_record(views, at, place).items()}


@given(tables, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 4))
def test_round_trip(table, segment, offset, before):
    data, place = written(table, segment, 8 * offset)
    assert read(bytes(8 * before) + data, place, table, 8 * before) == table
    assert len(data) % 8 == 0


@given(tables, st.sets(st.text(min_size=1, max_size=20)))
def test_only_what_was_asked_for_and_is_there(table, others):
    data, place = written(table)
    names = [*list(table)[::2], *others]
    assert read(data, place, names) == {name: table[name] for name in names if name in table}


@given(tables.filter(bool), st.data())
def test_a_flipped_bit_is_noticed_or_cannot_be_seen(table, draw):
    data, place = written(table)
    bad = bytearray(data)
    bad[draw.draw(st.integers(0, len(bad) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with suppress(CorruptData):
        assert read(bytes(bad), place, table) == table  # it was in the padding


def test_damage_of_one_column_leaves_the_others_readable():
    table = {"a": bytes(16), "b": bytes(16)}
    data, place = written(table)
    bad = bytearray(data)
    bad[-20] ^= 1
    assert read(bytes(bad), place, ["b"]) == {"b": bytes(16)}
    with pytest.raises(CorruptData, match="column a"):
        read(bytes(bad), place, ["a", "b"])


@pytest.mark.parametrize("moved", [Place(4, 16, 0), Place(3, 24, 0), Place(3, 17, 0)])
def test_a_record_of_another_place_is_not_believed(moved):
    data, place = written({"a": b"old"})
    with pytest.raises(CorruptData):
        read(data, moved._replace(length=place.length), ["a"])


@pytest.mark.parametrize("length", [0, 8, 39, 40, 64])
def test_a_wrong_length_is_not_believed(length):
    data, place = written({"a": bytes(100)})
    with pytest.raises(CorruptData):
        read(data, place._replace(length=length), ["a"])


def test_zeros_are_no_record():
    with pytest.raises(CorruptData):
        read(bytes(256), Place(0, 0, 256), ["a"])


def test_columns_are_views_in_the_order_that_was_asked_for():
    values = np.arange(7, dtype="<f4")
    data, place = written({"x": values, "y": bytes(3), "z": b""})
    found = read_record(Views(data, {"z": np.dtype("<i8"), "x": np.dtype("<f4")}), 0, place)
    assert list(found) == ["z", "x"]
    assert found["z"].shape == (0,)
    np.testing.assert_array_equal(found["x"], values)
    assert not found["x"].flags.owndata
    assert not found["x"].flags.writeable
    assert found["x"].ctypes.data % 8 == 0
    with pytest.raises(CorruptData, match="whole number"):
        read_record(Views(data, {"y": np.dtype("<f4")}), 0, place)
