"""Whatever happens to the files of a writer that was killed: never wrong bytes, and all other rows stay readable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from rillflow.errors import CorruptData
from rillflow.storage import SegmentReader, SegmentWriter
from rillflow.storage.records import Place
from rillflow.storage.segments import segment_numbers, segment_path

NAMES = {"tokens": np.dtype("<i4"), "mask": np.dtype("|u1")}

# Writes records whose content follows from their number, and prints each place once it is acknowledged.
WRITER = """
import sys, numpy as np
from pathlib import Path
from rillflow.storage import SegmentWriter
writer = SegmentWriter(Path(sys.argv[1]), 1 << 20, sys.argv[2])
n = 0
while True:
    rows = [{"tokens": np.full(2000 + k, k, "<i4"), "mask": bytes(k % 100)} for k in range(n, n + 7)]
    places = writer.write(rows)
    for place in places:
        print(n, *place)
        n += 1
    sys.stdout.flush()
"""


def read(folder, places):
    return SegmentReader(folder).read(places, NAMES)


def write(folder, count=3, limit=1 << 16):
    writer = SegmentWriter(folder, limit)
    places = writer.write([{"tokens": np.full(10, n, "<i4"), "mask": bytes(10)} for n in range(count)])
    writer.close()
    return places


def good(found):
    return [not isinstance(one, CorruptData) for one in found]


@pytest.mark.parametrize(("durability", "lines"), [("process", 7), ("process", 2000), ("machine", 700)])
def test_kill_9_in_the_middle_of_puts_loses_nothing(tmp_path, durability, lines):
    command = [sys.executable, "-c", WRITER, str(tmp_path), durability]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    acknowledged = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    acknowledged += process.stdout.read().splitlines()
    process.wait(30)
    process.stdout.close()
    places = [Place(*map(int, line.split()[1:])) for line in acknowledged if len(line.split()) == 4]
    assert len(places) >= lines - 1
    for n, one in enumerate(read(tmp_path, places)):
        assert not isinstance(one, CorruptData)
        np.testing.assert_array_equal(one["tokens"], np.full(2000 + n, n))
    last = places[-1]
    torn = Place(last.segment, last.offset + last.length, last.length)  # rows that were never acknowledged
    (found,) = read(tmp_path, [torn])
    assert isinstance(found, CorruptData) or found["tokens"][0] == len(places)
    after = write(tmp_path)
    assert min(place.segment for place in after) > last.segment
    assert good(read(tmp_path, [*places, *after])) == [True] * (len(places) + len(after))


def flipped(folder, at, bit=1):
    path = segment_path(folder, 0)
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 8, 12, 16, 24, 32, 41, 50, 60, 80])
def test_a_flipped_bit_in_a_header(tmp_path, at):
    places = write(tmp_path)
    flipped(tmp_path, places[1].offset + at)
    assert good(read(tmp_path, places)) == [True, False, True]


def test_a_flipped_bit_in_a_column(tmp_path):
    places = write(tmp_path)
    flipped(tmp_path, places[1].offset + places[1].length - 20)
    found = read(tmp_path, places)
    assert good(found) == [True, False, True]
    assert "tokens" in found[1].message
    (other,) = SegmentReader(tmp_path).read(places[1:2], {"mask": NAMES["mask"]})
    assert other["mask"].tobytes() == bytes(10)


def test_a_flipped_bit_in_the_padding_is_seen_by_nobody(tmp_path):
    places = write(tmp_path)
    flipped(tmp_path, places[1].offset + places[1].length - 1)
    found = read(tmp_path, places)
    assert [one["tokens"][0] for one in found] == [0, 1, 2]
    assert [one["mask"].tobytes() for one in found] == [bytes(10)] * 3


@pytest.mark.parametrize("left", [0, 5, 39, 41, 100])
def test_a_cut_file(tmp_path, left):
    places = write(tmp_path)
    reader = SegmentReader(tmp_path)
    assert good(reader.read(places, NAMES)) == [True] * 3
    os.truncate(segment_path(tmp_path, 0), places[1].offset + left)
    for each in (reader, SegmentReader(tmp_path)):  # one that has it mapped whole, and one that has not
        assert good(each.read(places, NAMES)) == [True, False, False]


def test_an_emptied_and_a_missing_file(tmp_path):
    places = write(tmp_path, 9, limit=300)
    assert len(segment_numbers(tmp_path)) > 3
    reader = SegmentReader(tmp_path)
    reader.read(places, NAMES)
    os.truncate(segment_path(tmp_path, 0), 0)
    segment_path(tmp_path, 2).unlink()
    for each in (reader, SegmentReader(tmp_path)):
        assert good(each.read(places, NAMES)) == [place.segment not in (0, 2) for place in places]


def test_old_records_in_a_file_are_not_believed(tmp_path):
    """A block that never reached the disk may show what an earlier file of this or another unit had there."""
    places = write(tmp_path)
    data = segment_path(tmp_path, 0).read_bytes()
    first, second = places[:2]
    moved = data[: second.offset] + data[: first.length] + data[second.offset + second.length :]
    segment_path(tmp_path, 0).write_bytes(moved)
    segment_path(tmp_path, 1).write_bytes(data)
    assert good(read(tmp_path, places)) == [True, False, True]
    assert good(read(tmp_path, [place._replace(segment=1) for place in places])) == [False] * 3


@pytest.mark.parametrize(
    "place", [Place(0, -8, 64), Place(-1, 0, 64), Place(0, 0, -8), Place(0, 4, 64), Place(0, 2**60, 8)]
)
def test_places_that_cannot_be(tmp_path, place):
    places = write(tmp_path)
    assert good(read(tmp_path, [places[0], place, places[2]])) == [True, False, True]
