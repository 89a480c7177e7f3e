"""Files of dropped segments are written over: never under a reader, never by two, and old bytes are never believed."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from rillflow.errors import CorruptData
from rillflow.storage import SegmentReader, SegmentWriter, recycling, segments
from rillflow.storage.segments import drop_segments, segment_numbers, segment_path

NAMES = {"tokens": np.dtype("|u1")}
LIMIT = 4096


@pytest.fixture
def written(tmp_path):
    """Writes rows with a writer of its own, which closes its files; returns their places."""

    def write(*values, limit=LIMIT):
        writer = SegmentWriter(tmp_path, limit)
        places = writer.write([{"tokens": value} for value in values])
        writer.sync()
        writer.close()
        return places

    return write


def read(folder, places):
    found = SegmentReader(folder).read(places, NAMES)
    return [one if isinstance(one, CorruptData) else one["tokens"].tobytes() for one in found]


def kept(folder):
    return sorted(folder.glob("*.free"))


def node(folder, number):
    return segment_path(folder, number).stat().st_ino


def test_the_next_segment_is_written_over_a_dropped_one(tmp_path, written):
    (old,) = written(b"old" * 100)
    inode = node(tmp_path, 0)
    drop_segments(tmp_path, [0])
    assert segment_numbers(tmp_path) == []
    assert isinstance(read(tmp_path, [old])[0], CorruptData)
    (new,) = written(b"new")
    assert (new.segment, node(tmp_path, 1)) == (1, inode)
    assert read(tmp_path, [new]) == [b"new"]
    assert kept(tmp_path) == []


def test_what_a_file_held_before_is_not_believed(tmp_path):
    """Records of the same lengths, so that old ones begin where new ones would."""
    writer = SegmentWriter(tmp_path, LIMIT)
    rows = [{"tokens": b"x" * 64} for _ in range(20)]
    old = writer.write(rows)
    writer.sync()
    writer.close()
    drop_segments(tmp_path, [0])
    writer = SegmentWriter(tmp_path, LIMIT)
    new = writer.write(rows[:3])
    writer.sync()
    behind = [place._replace(segment=1) for place in old[3:]]
    found = read(tmp_path, [*new, *behind])  # while the file is still open, with all its old bytes
    assert found[:3] == [b"x" * 64] * 3
    assert all(isinstance(one, CorruptData) for one in found[3:])
    assert all(isinstance(one, CorruptData) for one in read(tmp_path, old))
    writer.close()
    assert segment_path(tmp_path, 1).stat().st_size == sum(place.length for place in new)


def test_a_torn_record_over_an_old_one_is_not_believed(tmp_path, written):
    written(b"o" * 1000)
    drop_segments(tmp_path, [0])
    (new,) = written(b"n" * 1000)
    with open(segment_path(tmp_path, 1), "r+b") as file:  # the last of its bytes never came
        file.seek(new.length - 512)
        file.write(b"o" * 512)
    assert isinstance(read(tmp_path, [new])[0], CorruptData)


def test_no_bytes_change_under_a_view(tmp_path, written):
    (old,) = written(b"old" * 100)
    (found,) = SegmentReader(tmp_path).read([old], NAMES)
    inode = node(tmp_path, 0)
    drop_segments(tmp_path, [0])
    assert kept(tmp_path) == []
    written(b"new" * 100)
    assert node(tmp_path, 1) != inode
    assert found["tokens"].tobytes() == b"old" * 100


def test_a_file_is_free_again_when_its_last_view_is_gone(tmp_path, written):
    places = written(b"a", b"b")
    found = SegmentReader(tmp_path).read(places, NAMES)
    del found[0]
    drop_segments(tmp_path, [0])
    assert kept(tmp_path) == []  # the other view holds it
    (other,) = written(b"c")
    del found
    drop_segments(tmp_path, [other.segment])
    assert len(kept(tmp_path)) == 1


def test_a_reader_that_comes_while_its_file_is_dropped_finds_none(tmp_path, written, monkeypatch):
    (place,) = written(b"old")
    real = recycling._lock

    def dropped_before(descriptor, kind):
        monkeypatch.setattr(recycling, "_lock", real)
        drop_segments(tmp_path, [0])
        real(descriptor, kind)

    monkeypatch.setattr(recycling, "_lock", dropped_before)
    assert isinstance(read(tmp_path, [place])[0], CorruptData)
    assert len(kept(tmp_path)) == 1


def test_a_file_that_is_being_dropped_cannot_be_mapped(tmp_path, written):
    (place,) = written(b"old")
    descriptor = os.open(segment_path(tmp_path, 0), os.O_RDWR)
    recycling._lock(descriptor, recycling.fcntl.F_WRLCK)
    assert isinstance(read(tmp_path, [place])[0], CorruptData)
    os.close(descriptor)
    assert read(tmp_path, [place]) == [b"old"]


def test_only_so_many_are_kept(tmp_path, written):
    written(*(b"x" * 50 for _ in range(recycling.MOST_KEPT + 5)), limit=64)
    drop_segments(tmp_path, segment_numbers(tmp_path))
    assert len(kept(tmp_path)) == recycling.MOST_KEPT
    assert segment_numbers(tmp_path) == []


def test_a_copy_made_of_links_is_left_as_it_is(tmp_path, written):
    written(b"old")
    copy = tmp_path / "copy"
    os.link(segment_path(tmp_path, 0), copy)
    before = copy.read_bytes()
    drop_segments(tmp_path, [0])
    assert kept(tmp_path) == []
    (place,) = written(b"one more")
    drop_segments(tmp_path, [place.segment])
    os.link(kept(tmp_path)[0], tmp_path / "another")
    written(b"new")
    assert copy.read_bytes() == before
    assert len(kept(tmp_path)) == 1  # nobody writes over it


def test_writers_never_share_a_file(tmp_path, written):
    written(*(b"x" * 50 for _ in range(recycling.MOST_KEPT)), limit=64)
    drop_segments(tmp_path, segment_numbers(tmp_path))
    writers = [SegmentWriter(tmp_path, LIMIT) for _ in range(2 * recycling.MOST_KEPT)]
    start, places = threading.Barrier(len(writers)), [None] * len(writers)

    def work(n):
        start.wait(60)
        places[n] = writers[n].write([{"tokens": b"%d" % n}])[0]
        writers[n].sync()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(writers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({node(tmp_path, place.segment) for place in places}) == len(writers)
    assert read(tmp_path, places) == [b"%d" % n for n in range(len(writers))]
    assert kept(tmp_path) == []
    drop_segments(tmp_path, [place.segment for place in places])
    assert len(segment_numbers(tmp_path)) == len(writers)  # all of them are still written
    for writer in writers:
        writer.close()


def test_a_full_disk_gets_the_kept_files_back(tmp_path, written, monkeypatch):
    written(*(b"x" * 50 for _ in range(4)), limit=64)
    drop_segments(tmp_path, [0, 1])
    assert len(kept(tmp_path)) == 2
    real = segments.write_atomic

    def full_once(path, data):
        monkeypatch.setattr(segments, "write_atomic", real)
        with segments.disk_errors(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments, "write_atomic", full_once)
    drop_segments(tmp_path, [2, 3])
    assert [path.name for path in kept(tmp_path)] == ["00000003.free"]
    assert segment_numbers(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "no such locks"), None])
def test_without_locks_files_are_removed(tmp_path, written, monkeypatch, error):
    def refused(*_):
        raise error

    if error is None:
        monkeypatch.setattr(recycling, "_SET_LOCK", None)
    else:
        monkeypatch.setattr(recycling.fcntl, "fcntl", refused)
    (place,) = written(b"value")
    assert read(tmp_path, [place]) == [b"value"]
    drop_segments(tmp_path, [0])
    assert kept(tmp_path) == [] == segment_numbers(tmp_path)


def test_who_looks_while_a_file_takes_anothers_place_finds_it_written(tmp_path, written, monkeypatch):
    """The look had the file that was there before: that one is nobody's any more, its place is."""
    written(b"old")
    drop_segments(tmp_path, [0])
    opened, swapped, found = threading.Event(), threading.Event(), []
    lock, take = segments.fcntl.flock, segments.reuse
    looker = threading.Thread(target=lambda: found.extend(segments.closed_segments(tmp_path, [1])))

    def locked(descriptor, how):
        if threading.current_thread() is looker:
            opened.set()
            assert swapped.wait(20)
        lock(descriptor, how)

    def taken(path):
        looker.start()
        assert opened.wait(20)
        return take(path)

    monkeypatch.setattr(segments.fcntl, "flock", locked)
    monkeypatch.setattr(segments, "reuse", taken)
    writer = SegmentWriter(tmp_path, LIMIT)
    writer.write([{"tokens": b"new"}])
    swapped.set()
    looker.join(20)
    writer.close()
    assert found == []
