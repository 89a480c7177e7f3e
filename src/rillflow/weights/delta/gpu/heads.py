"""The heads of deltas and of their segments, read before anything else, and the checksums, which may come last.

The first kernel needs nothing but heads, so the device has work while the bytes are copied and their checksums are
computed. Until then a head may be damaged: reading one is safe whatever it says, and before an error about what it says
is raised, its checksum must be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import xxhash

from rillflow.errors import CorruptData
from rillflow.weights.delta.format import DAMAGED, HEADER_SIZE, LEAST_LOG2, MAGIC, MOST_LOG2, RAW, SAME, Buffer, Header
from rillflow.weights.delta.gpu.batch import Array
from rillflow.weights.delta.gpu.memory import addresses, byte_at, copy_bytes
from rillflow.weights.delta.jit import compiled

# `format` says what they are.
HEAD = np.dtype(
    [
        ("magic", "S4"), ("dtype", "u1"), ("log2", "u1"), ("weights", "<u8"), ("base", "<u8"), ("result", "<u8"),
        ("checksum", "<u8"),
    ]
)  # fmt: skip
CHECKSUM = 8
SEALED = HEADER_SIZE - CHECKSUM
_SEGMENT = 5
# The starts of all classes are within so many bytes of a segment.
FIRST_BYTES = 256


class Segments(NamedTuple):
    """Of each segment, its kind, where its bytes begin in its delta, how many there are, and the first ones (which may
    be followed by others)."""

    kind: Array
    begin: Array
    size: Array
    first: Array


class Deltas:
    """Deltas of a call: their bytes, which live as long as this does, where these are, and a row of `HEAD` of each."""

    def __init__(self, views: list[memoryview], address: Array, length: Array, head: Array) -> None:
        self.views, self.address, self.length, self.head = views, address, length, head

    @classmethod
    def of(cls, deltas: Sequence[Buffer]) -> Deltas:
        views = [memoryview(data).cast("B") for data in deltas]
        length = np.fromiter(map(len, views), np.int64, len(views))
        if length.min(initial=HEADER_SIZE) < HEADER_SIZE:
            raise CorruptData("these bytes are no delta", DAMAGED)
        address, head = addresses(views), np.empty(len(views), HEAD)
        _gather(address, head.ctypes.data, HEADER_SIZE)
        if (head["magic"] != MAGIC).any():
            raise CorruptData("these bytes are no delta", DAMAGED)
        if head["log2"].min(initial=LEAST_LOG2) < LEAST_LOG2 or head["log2"].max(initial=0) > MOST_LOG2:
            raise CorruptData("a delta has segments of an impossible size", DAMAGED)
        return cls(views, address, length, head)

    def part(self, numbers: Sequence[int]) -> Deltas:
        views = [self.views[number] for number in numbers]
        return Deltas(views, self.address[numbers], self.length[numbers], self.head[numbers])

    def segments(self, numbers: Array) -> Segments:
        """The segments of all deltas, of so many each, which must be all there is."""
        total = int(numbers.sum())
        kind_S, begin_S, size_S = np.empty((3, total), np.int64)
        first = np.zeros((total, FIRST_BYTES), np.uint8)
        fit = _segments(self.address, self.length, numbers, kind_S, begin_S, size_S, first.ctypes.data)
        if not fit:
            raise CorruptData("a delta is shorter or longer than its segments", DAMAGED)
        if ((kind_S > RAW) | ((kind_S == SAME) & (size_S > 0))).any():
            raise CorruptData("a delta has a segment of an unknown kind", DAMAGED)
        return Segments(kind_S, begin_S, size_S, first.reshape(-1))


@compiled
def _gather(address: Array, to: int, size: int) -> None:
    """The first bytes of each, in a row."""
    for number in range(len(address)):
        copy_bytes(to + number * size, address[number], size)


@compiled
def _segments(
    address: Array, length: Array, numbers: Array, kind: Array, begin: Array, size: Array, first: int
) -> bool:  # fmt: skip
    """Whether the deltas are as long as their segments. Nothing outside of a delta is read."""
    s = 0
    for number in range(len(address)):
        at, end = HEADER_SIZE, length[number]
        for _ in range(numbers[number]):
            if at + _SEGMENT > end:
                return False
            here = address[number] + at
            kind[s], size[s] = byte_at(here), 0
            for k in range(4):
                size[s] |= byte_at(here + 1 + k) << (8 * k)
            at += _SEGMENT
            begin[s] = at
            copy_bytes(first + s * FIRST_BYTES, address[number] + at, min(FIRST_BYTES, end - at))
            at += size[s]
            s += 1
        if at != end:
            return False
    return True


def header_of(row: Array) -> Header:
    return Header(*row.tolist()[1:-1])


class Checksums:
    """Whether the bytes of all deltas are those that were written.

    Who copies a delta may compute its checksum along the way: then it takes it, says what it is waiting for, and writes
    to `found`. All others are computed when they are asked for.
    """

    def __init__(self, deltas: Deltas) -> None:
        self._deltas, self._left = deltas, np.ones(len(deltas.views), np.bool)
        self.found = np.zeros(len(deltas.views), np.uint64)
        self._under_way: list[Future[None]] = []

    def take(self, numbers: Array, under_way: Sequence[Future[None]]) -> None:
        self._left[numbers] = False
        self._under_way += under_way

    def wait(self) -> None:
        """CorruptData unless all are right."""
        for share in self._under_way:
            share.result()
        for number in np.flatnonzero(self._left).tolist():
            view = self._deltas.views[number]
            checksum = xxhash.xxh3_64(view[:SEALED])
            checksum.update(view[HEADER_SIZE:])
            self.found[number] = checksum.intdigest()
        self._left[:] = False
        if (self.found != self._deltas.head["checksum"]).any():
            raise CorruptData("a delta does not match its checksum", DAMAGED)
