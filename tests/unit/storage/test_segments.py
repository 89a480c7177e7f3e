"""Segment files: durable as promised, written by several at once, dropped once, mapped safely."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import CorruptData, DiskFull, StorageError
from rillflow.storage import SegmentReader, SegmentWriter, segment_reader, segments
from rillflow.storage.records import Place
from rillflow.storage.segment_reader import read_range
from rillflow.storage.segments import drop_segments, segment_numbers, segment_path

NAMES = {"tokens": np.dtype("|u1")}


@pytest.fixture
def open_writer():
    writers = []

    def open_one(folder, **options):
        writers.append(SegmentWriter(folder, **options))
        return writers[-1]

    yield open_one
    for writer in writers:
        writer.close()


def put(writer, *values):
    return writer.write([{"tokens": value} for value in values])


def contents(folder, places):
    found = SegmentReader(folder).read(places, NAMES)
    return [one if isinstance(one, CorruptData) else one["tokens"].tobytes() for one in found]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_records_of_many_segments_come_back_in_order(tmp_path, open_writer):
    writer = open_writer(tmp_path, limit=300)
    places = put(writer, *(b"%d" % n for n in range(40)))
    assert len({place.segment for place in places}) > 5
    assert contents(tmp_path, places[::-1]) == [b"%d" % n for n in reversed(range(40))]


tables = st.dictionaries(st.sampled_from(["a", "b", "c", "d.f4", "é"]), st.binary(max_size=300))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(tables, max_size=6), max_size=5), st.integers(1, 2000))
def test_whatever_is_put_comes_back(puts, limit):
    dtypes = dict.fromkeys(["a", "b", "c", "d.f4", "é"], np.dtype("|u1"))
    with tempfile.TemporaryDirectory() as name:
        writer, reader = SegmentWriter(Path(name), limit), SegmentReader(Path(name))
        places = []
        for rows in puts:
            places += writer.write(rows)
        found = reader.read(places, dtypes)
        writer.close()
        expected = [row for rows in puts for row in rows]
        assert [{key: one.tobytes() for key, one in row.items()} for row in found] == expected


def test_buffers_of_any_kind_are_written_as_they_are(tmp_path, open_writer):
    values = np.arange(12, dtype="<f4")
    kinds = [
        values,
        values.tobytes(),
        bytearray(values),
        memoryview(values),
        values.reshape(3, 4),
        values.astype("<f2"),
    ]
    places = put(open_writer(tmp_path), *kinds)
    assert contents(tmp_path, places) == [values.tobytes()] * 5 + [values.astype("<f2").tobytes()]


def test_many_small_buffers_and_one_large_one(tmp_path, open_writer):
    """More buffers than one call of the system takes, and a record longer than a segment should be."""
    large = os.urandom(100_003)
    writer = open_writer(tmp_path, limit=1 << 16)
    (place,) = writer.write([{f"c{n}": b"%d" % n for n in range(3000)}])
    (after,) = put(writer, large)
    assert contents(tmp_path, [after]) == [large]
    (found,) = SegmentReader(tmp_path).read([place], {"c2999": np.dtype("|u1")})
    assert found["c2999"].tobytes() == b"2999"


def test_the_system_may_take_any_part_of_a_write(tmp_path, open_writer, monkeypatch):
    real = os.pwritev

    def some(descriptor, buffers, offset):
        first = memoryview(buffers[0]).cast("B")
        return real(descriptor, [first[:7]], offset) if len(first) > 7 else real(descriptor, buffers[:1], offset)

    monkeypatch.setattr("rillflow.storage.segments.os.pwritev", some)
    values = [os.urandom(n) for n in (0, 1, 50, 333)]
    assert contents(tmp_path, put(open_writer(tmp_path), *values)) == values


def test_files_take_turns_between_two_threads(tmp_path, open_writer, monkeypatch):
    monkeypatch.setattr(segments, "_WRITE_BYTES", 64)
    real, threads = os.pwritev, {}

    def noted(descriptor, buffers, offset):
        if threading.current_thread().name.startswith("segment-writes"):
            threads.setdefault(os.fstat(descriptor).st_ino, set()).add(threading.get_ident())
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("rillflow.storage.segments.os.pwritev", noted)
    values = [os.urandom(100) for _ in range(12)]
    places = put(open_writer(tmp_path, limit=600), *values)
    files = [threads[segment_path(tmp_path, number).stat().st_ino] for number in range(places[-1].segment + 1)]
    assert len(files) > 2
    assert all(len(of) == 1 for of in files)
    assert all(one.isdisjoint(after) for one, after in pairwise(files))
    assert contents(tmp_path, places) == values


def test_a_file_is_preallocated_while_open_and_cut_when_closed(tmp_path):
    writer = SegmentWriter(tmp_path, limit=1 << 20)
    assert segment_numbers(tmp_path) == []
    (place,) = put(writer, b"value")
    assert segment_path(tmp_path, 0).stat().st_size == 1 << 20
    reader = SegmentReader(tmp_path)
    reader.read([place], NAMES)
    writer.close()
    assert segment_path(tmp_path, 0).stat().st_size == place.length
    behind = Place(0, place.length, place.length)  # still mapped, but no longer there: reading it would be fatal
    found, gone = reader.read([place, behind], NAMES)
    assert found["tokens"].tobytes() == b"value"
    assert isinstance(gone, CorruptData)


def test_a_disk_that_cannot_preallocate_is_written_anyway(tmp_path, open_writer, monkeypatch):
    monkeypatch.setattr("rillflow.storage.segments.os.posix_fallocate", full)
    writer, reader = open_writer(tmp_path), SegmentReader(tmp_path)
    for n in range(3):  # the file grows under the reader
        (found,) = reader.read(put(writer, b"%d" % n * 5000), NAMES)
        assert found["tokens"].tobytes() == b"%d" % n * 5000


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_full_disk_acknowledges_nothing_and_the_writer_goes_on(tmp_path, open_writer, monkeypatch, call):
    writer = open_writer(tmp_path, durability="machine")
    before = put(writer, b"before")
    with monkeypatch.context() as patched:
        patched.setattr(f"rillflow.storage.segments.os.{call}", full)
        for _ in range(2):
            with pytest.raises(DiskFull):
                put(writer, b"lost")
    after = put(writer, b"after")
    assert after[0].segment > before[0].segment
    assert contents(tmp_path, before + after) == [b"before", b"after"]
    assert sorted(segment_numbers(tmp_path)) == [before[0].segment, after[0].segment], "failed writes left files"


def test_a_sync_that_fails_behind_the_writer_fails_the_put(tmp_path, open_writer, monkeypatch):
    """The put rolls over several files, and one that was already left behind cannot be synced."""
    writer = open_writer(tmp_path, limit=64, durability="machine")
    real, calls = os.fdatasync, []

    def second_fails(descriptor):
        calls.append(descriptor)
        return full() if len(calls) == 2 else real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr("rillflow.storage.segments.os.fdatasync", second_fails)
        with pytest.raises(DiskFull):
            put(writer, *(b"%d" % n for n in range(5)))
    assert contents(tmp_path, put(writer, b"after")) == [b"after"]


@pytest.mark.parametrize(("durability", "synced"), [("process", False), ("machine", True)])
def test_only_the_durability_of_a_machine_waits_for_the_disk(tmp_path, open_writer, monkeypatch, durability, synced):
    real, syncs = os.fdatasync, []
    monkeypatch.setattr("rillflow.storage.segments.os.fdatasync", lambda file: (syncs.append(file), real(file)))
    places = put(open_writer(tmp_path, limit=1 << 20, durability=durability), *(bytes(100_000) for _ in range(30)))
    assert len({place.segment for place in places}) == 3
    assert bool(syncs) == synced


def test_rows_written_together_are_in_one_file(tmp_path, open_writer):
    writer = open_writer(tmp_path, limit=500)
    rows = [{"tokens": b"x" * 64}] * 3
    assert [writer.write_together(rows) for _ in range(3)] == [0, 1, 2]
    assert writer.write_together(rows * 20) == 3  # more than a file's limit


def test_a_new_file_that_cannot_be_entered_into_the_folder_fails_the_put(tmp_path, open_writer, monkeypatch):
    writer = open_writer(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("rillflow.storage.segments.fsync_folder", full)
        with pytest.raises(DiskFull):
            put(writer, b"lost")
    assert contents(tmp_path, put(writer, b"after")) == [b"after"]


def test_several_writers_of_one_folder_never_share_a_file(tmp_path, open_writer):
    writers = [open_writer(tmp_path, limit=200) for _ in range(4)]
    places: dict[Place, bytes] = {}

    def work(number, writer):
        for n in range(30):
            value = b"%d-%d" % (number, n)
            places[put(writer, value)[0]] = value

    threads = [threading.Thread(target=work, args=one) for one in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(places) == 120
    assert contents(tmp_path, list(places)) == list(places.values())


def test_a_number_is_never_used_again(tmp_path, open_writer):
    for n in range(3):
        writer = SegmentWriter(tmp_path)
        (place,) = put(writer, b"value")
        assert place.segment == n
        writer.close()
        drop_segments(tmp_path, [n, 77])
        assert segment_numbers(tmp_path) == []
    drop_segments(tmp_path, [0, 1, 2])
    assert put(open_writer(tmp_path), b"value")[0].segment == 3


def test_a_number_that_is_dropped_while_a_writer_looks_is_not_used_again(tmp_path, open_writer, monkeypatch):
    real = segments._highest_dropped

    def a_whole_life_in_between(folder):
        """The writer has seen no file and no dropped one; then one comes and goes."""
        monkeypatch.undo()
        seen = real(folder)
        other = SegmentWriter(folder)
        assert put(other, b"short life")[0].segment == 0
        other.close()
        drop_segments(folder, [0])
        return seen

    monkeypatch.setattr(segments, "_highest_dropped", a_whole_life_in_between)
    assert put(open_writer(tmp_path), b"value")[0].segment == 1
    assert segment_numbers(tmp_path) == [1]


def test_a_segment_that_is_still_written_is_not_dropped(tmp_path, open_writer):
    writer = open_writer(tmp_path)
    places = put(writer, b"first")
    drop_segments(tmp_path, [0])
    places += put(writer, b"second")
    assert contents(tmp_path, places) == [b"first", b"second"]
    writer.close()
    drop_segments(tmp_path, [0])
    assert all(isinstance(one, CorruptData) for one in contents(tmp_path, places))


def test_a_reader_of_many_segments_holds_few_files_open(tmp_path, open_writer):
    places = put(open_writer(tmp_path, limit=64), *(b"%d" % n for n in range(200)))
    reader = SegmentReader(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    (first,) = reader.read(places[:1], NAMES)
    for n, place in enumerate(places):
        (found,) = reader.read([place], NAMES)
        assert found["tokens"].tobytes() == b"%d" % n
    assert len(os.listdir("/proc/self/fd")) - before < 100
    assert first["tokens"].tobytes() == b"0"


def test_a_file_is_mapped_for_as_long_as_a_view_is_referred_to(tmp_path, open_writer):
    def mapped():
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]

    places = put(open_writer(tmp_path, limit=64), *(b"%d" % n for n in range(10)))
    found = SegmentReader(tmp_path).read(places, NAMES)
    assert len(mapped()) == 10
    del found[1:]
    assert len(mapped()) == 1
    assert found[0]["tokens"].tobytes() == b"0"


def test_ranges(tmp_path, open_writer):
    (place,) = put(open_writer(tmp_path, limit=4096), b"value")
    assert len(read_range(tmp_path, 0, 0, place.length)) == place.length
    for number, start, end in ((1, 0, 8), (0, 0, 5000), (0, 9000, 9008)):
        with pytest.raises(CorruptData):
            read_range(tmp_path, number, start, end)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        SegmentWriter(tmp_path / "file" / "unit")


def test_views_of_very_many_segments_hold_a_bounded_number_of_files_open(tmp_path, open_writer, monkeypatch):
    monkeypatch.setattr(segment_reader, "_MOST_VIEWED", 20)
    places = put(open_writer(tmp_path, limit=64), *(b"%d" % n for n in range(200)))
    reader = SegmentReader(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    held = reader.read([*places, Place(9999, 0, 80)], NAMES)
    assert len(os.listdir("/proc/self/fd")) - before < 20 + 40
    assert [one["tokens"].tobytes() for one in held[:-1]] == [b"%d" % n for n in range(200)]
    assert not any(one["tokens"].flags.writeable for one in held[:-1])
    assert isinstance(held[-1], CorruptData)


def test_a_disk_too_full_for_the_highest_number_is_freed_all_the_same(tmp_path, open_writer, monkeypatch):
    put(open_writer(tmp_path, limit=64), *(b"%d" % n for n in range(5)))
    real = segments.write_atomic

    def write(path, data):
        if len(segment_numbers(tmp_path)) == 5:
            raise DiskFull("no space left")
        real(path, data)

    monkeypatch.setattr(segments, "write_atomic", write)
    drop_segments(tmp_path, [0, 1, 2, 3])
    assert segment_numbers(tmp_path) == [4]
    assert put(open_writer(tmp_path), b"next")[0].segment == 5


def test_odd_files_in_the_folder(tmp_path, open_writer):
    (tmp_path / "notes.seg").write_text("mine")
    assert put(open_writer(tmp_path), b"value")[0].segment == 0
    (tmp_path / segments.DROPPED_FILE).write_bytes(b"")
    with pytest.raises(CorruptData, match="dropped holds no number"):
        put(open_writer(tmp_path), b"value")


def test_a_range_that_the_disk_cannot_read_is_damage(tmp_path, open_writer, monkeypatch):
    (place,) = put(open_writer(tmp_path), b"value")

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(segments.os, "pread", broken)
    with pytest.raises(CorruptData, match="the disk cannot read"):
        read_range(tmp_path, 0, 0, place.length)
