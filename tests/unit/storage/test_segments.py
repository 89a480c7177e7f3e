"""Segments: what was written comes back or an error does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import CorruptData, DiskFull
from rillflow.storage import SegmentReader, SegmentWriter
from rillflow.storage.segments import decode_record, encode_record, segment_path

columns = st.dictionaries(st.text(min_size=1, max_size=12), st.binary(max_size=200), max_size=6)


@given(columns)
def test_record_round_trip(table: dict[str, bytes]) -> None:
    record = encode_record(table)
    assert len(record) % 8 == 0
    assert {name: bytes(view) for name, view in decode_record(memoryview(record)).items()} == table


@given(columns, st.data())
def test_any_flipped_bit_is_noticed(table: dict[str, bytes], data: st.DataObject) -> None:
    record = bytearray(encode_record(table))
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptData):
        decode_record(memoryview(bytes(record)))


@given(columns, st.data())
def test_any_cut_is_noticed(table: dict[str, bytes], data: st.DataObject) -> None:
    record = encode_record(table)
    with pytest.raises(CorruptData):
        decode_record(memoryview(record)[: data.draw(st.integers(0, len(record) - 1))])


@pytest.fixture
def open_writer() -> Iterator[Callable[..., SegmentWriter]]:
    writers: list[SegmentWriter] = []

    def open_one(folder: Path, **options: int) -> SegmentWriter:
        writers.append(SegmentWriter(folder, **options))
        return writers[-1]

    yield open_one
    for writer in writers:
        writer.close()


Open = Callable[..., SegmentWriter]


def test_reader_sees_what_is_appended_later(tmp_path: Path, open_writer: Open) -> None:
    writer, reader = open_writer(tmp_path), SegmentReader(tmp_path)
    for value in (b"one", b"two" * 1000):
        place = writer.append({"tokens": value})
        writer.sync()
        assert bytes(reader.read(*place, ["tokens"])["tokens"]) == value


def test_only_asked_columns_are_returned(tmp_path: Path, open_writer: Open) -> None:
    writer = open_writer(tmp_path)
    place = writer.append({"tokens": b"1", "mask": b"2"})
    assert set(SegmentReader(tmp_path).read(*place, ["mask", "absent"])) == {"mask"}


def test_new_segment_after_the_limit(tmp_path: Path, open_writer: Open) -> None:
    writer = open_writer(tmp_path, limit=256)
    places = [writer.append({"tokens": bytes(100)}) for _ in range(4)]
    assert len({segment for segment, _, _ in places}) > 1
    reader = SegmentReader(tmp_path)
    assert all(len(reader.read(*place, ["tokens"])["tokens"]) == 100 for place in places)


def test_a_torn_tail_is_left_alone(tmp_path: Path, open_writer: Open) -> None:
    first = open_writer(tmp_path)
    good = first.append({"tokens": b"good"})
    first.append({"tokens": b"torn"})
    path = segment_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-5])
    after = open_writer(tmp_path).append({"tokens": b"after"})
    reader = SegmentReader(tmp_path)
    assert bytes(reader.read(*good, ["tokens"])["tokens"]) == b"good"
    assert bytes(reader.read(*after, ["tokens"])["tokens"]) == b"after"


class FullDisk:
    """A file whose disk fills up in the middle of a write."""

    def __init__(self, file: object) -> None:
        self._file = file

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, open_writer: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path)
    before = writer.append({"tokens": b"before"})
    monkeypatch.setattr(writer, "_file", FullDisk(writer._file))
    with pytest.raises(DiskFull, match="no space left"):
        writer.append({"tokens": bytes(1000)})
    after = writer.append({"tokens": b"after"})
    reader = SegmentReader(tmp_path)
    assert bytes(reader.read(*before, ["tokens"])["tokens"]) == b"before"
    assert bytes(reader.read(*after, ["tokens"])["tokens"]) == b"after"


@pytest.mark.parametrize("limit", [64 << 20, 64])
def test_a_writer_that_could_not_open_its_next_file_goes_on_when_it_can(
    tmp_path: Path, open_writer: Open, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = open_writer(tmp_path, limit=limit)
    before = writer.append({"tokens": b"before"})
    with monkeypatch.context() as patched:
        patched.setattr("rillflow.storage.segments.fsync_folder", full)
        if limit > 64:
            writer._file = FullDisk(writer._file)  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(DiskFull):
                writer.append({"tokens": bytes(1000)})
    after = writer.append({"tokens": b"after"})
    writer.sync()
    reader = SegmentReader(tmp_path)
    assert bytes(reader.read(*before, ["tokens"])["tokens"]) == b"before"
    assert bytes(reader.read(*after, ["tokens"])["tokens"]) == b"after"


def test_two_writers_of_one_folder_never_share_a_file(tmp_path: Path, open_writer: Open) -> None:
    """A service that lives on beside the one that was started in its place."""
    writers = [open_writer(tmp_path, limit=64) for _ in range(2)]
    places = {writer.append({"tokens": b"%d" % n}): n for n in range(10) for writer in writers}
    assert len(places) == 20
    reader = SegmentReader(tmp_path)
    for place, n in places.items():
        assert bytes(reader.read(*place, ["tokens"])["tokens"]) == b"%d" % n


def test_a_reader_of_many_segments_holds_few_files_open(tmp_path: Path, open_writer: Open) -> None:
    writer = open_writer(tmp_path, limit=64)
    places = [writer.append({"tokens": b"%d" % n}) for n in range(200)]
    reader = SegmentReader(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    first = reader.read(*places[0], ["tokens"])["tokens"]
    for n, place in enumerate(places):
        assert bytes(reader.read(*place, ["tokens"])["tokens"]) == b"%d" % n
    assert len(os.listdir("/proc/self/fd")) - before < 100
    assert bytes(first) == b"0"  # a view stays valid after its file has left the cache
