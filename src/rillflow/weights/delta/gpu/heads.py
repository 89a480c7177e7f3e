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
from rillflow.weights.delta.format import (
    CODED,
    DAMAGED,
    HEADER_SIZE,
    LEAST_LOG2,
    MAGIC,
    MOST_LOG2,
    RAW,
    SAME,
    Buffer,
    Header,
)
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
# The last class that kernels know.
_MOST = 15


class Segments(NamedTuple):
    """Of each segment: its kind; where its bytes begin in its delta and how many there are; limits (see
    `words.reached`) in two numbers, and the last class, if it is coded; and whether it has too many classes for the
    kernels."""

    kind: Array
    begin: Array
    size: Array
    limits: Array
    many: Array


class Deltas:
    """Deltas of a call: their bytes, which live as long as this does, where these are, and a row of `HEAD` of each."""

    def __init__(self, views: list[memoryview], address: Array, length: Array, head: Array) -> None:
        self._views, self.address, self.length, self.head = views, address, length, head

    @classmethod
    def of(cls, deltas: Sequence[Buffer]) -> Deltas:
        views = [memoryview(data) for data in deltas]
        address, length = addresses(views)
        if length.min(initial=HEADER_SIZE) < HEADER_SIZE:
            raise CorruptData("these bytes are no delta", DAMAGED)
        head = np.empty(len(views), HEAD)
        _gather(address, head.ctypes.data, HEADER_SIZE)
        if (head["magic"] != MAGIC).any():
            raise CorruptData("these bytes are no delta", DAMAGED)
        if head["log2"].min(initial=LEAST_LOG2) < LEAST_LOG2 or head["log2"].max(initial=0) > MOST_LOG2:
            raise CorruptData("a delta has segments of an impossible size", DAMAGED)
        return cls(views, address, length, head)

    def __len__(self) -> int:
        return len(self._views)

    def view(self, number: int) -> memoryview:
        """The bytes of one of them."""
        return self._views[number].cast("B")

    def part(self, numbers: Sequence[int]) -> Deltas:
        if len(numbers) == len(self):
            return self
        views = [self._views[number] for number in numbers]
        return Deltas(views, self.address[numbers], self.length[numbers], self.head[numbers])

    def segments(self, tensor: Array, exponents: int) -> Segments:
        """All segments, given the delta of each in ascending order, which must be all there is."""
        kind_S, begin_S, size_S = np.empty((3, len(tensor)), np.int64)
        limits, many = np.zeros((len(tensor), 3), np.int64), np.zeros(len(tensor), np.bool)
        wrong = _segments(
            self.address, self.length, tensor, exponents, kind_S, begin_S, size_S, limits, many
        )  # fmt: skip
        if wrong:
            raise CorruptData(_WRONG[wrong - 1], DAMAGED)
        return Segments(kind_S, begin_S, size_S, limits, many)


_WRONG = (
    "a delta is shorter or longer than its segments", "a delta has a segment of an unknown kind",
    "a delta has impossible classes",
)  # fmt: skip


@compiled
def _gather(address: Array, to: int, size: int) -> None:
    """The first bytes of each, in a row."""
    for number in range(len(address)):
        copy_bytes(to + number * size, address[number], size)


@compiled
def _segments(
    address: Array, length: Array, tensor: Array, exponents: int, kind: Array, begin: Array, size: Array,
    limits: Array, many: Array,
) -> int:  # fmt: skip
    """Which of `_WRONG` is the case, from 1 on; 0 if none is. Nothing outside of a delta is read."""
    s = 0
    for number in range(len(address)):
        at, end = HEADER_SIZE, length[number]
        while s < len(tensor) and tensor[s] == number:
            if at + _SEGMENT > end:
                return 1
            here = address[number] + at
            kind[s], size[s] = byte_at(here), 0
            for k in range(4):
                size[s] |= byte_at(here + 1 + k) << (8 * k)
            at += _SEGMENT
            begin[s] = at
            at += size[s]
            if at > end:
                return 1
            if kind[s] > RAW or (kind[s] == SAME and size[s]):
                return 2
            if kind[s] == CODED and size[s]:
                last = _limits(here + _SEGMENT, size[s], exponents, limits[s])
                if last < 0:
                    return 3
                many[s] = last > _MOST
            s += 1
        if at != end:
            return 1
    return 0


@compiled
def _limits(address: int, size: int, exponents: int, limits: Array) -> int:
    """The last class of a coded segment, whose limits are filled in; -1 if its classes are none."""
    last: int = byte_at(address)
    if 1 + last > size:
        return -1
    before = 0
    for c in range(1, last + 1):
        start = byte_at(address + c)
        if start <= before or start >= exponents:
            return -1
        before = start
        if c <= _MOST:
            limits[c // 8] |= (256 - start) << (8 * (c % 8))
    limits[2] = last
    return last


def header_of(row: Array) -> Header:
    return Header(*row.tolist()[1:-1])


class Checksums:
    """Whether the bytes of all deltas are those that were written.

    Who copies a delta may compute its checksum along the way: then it takes it, says what it is waiting for, and writes
    to `found`. All others are computed when they are asked for.
    """

    def __init__(self, deltas: Deltas) -> None:
        self._deltas, self._left = deltas, np.ones(len(deltas), np.bool)
        self.found = np.zeros(len(deltas), np.uint64)
        self._under_way: list[Future[None]] = []

    def take(self, numbers: Array, under_way: Sequence[Future[None]]) -> None:
        self._left[numbers] = False
        self._under_way += under_way

    def wait(self) -> None:
        """CorruptData unless all are right."""
        for share in self._under_way:
            share.result()
        for number in np.flatnonzero(self._left).tolist():
            view = self._deltas.view(number)
            checksum = xxhash.xxh3_64(view[:SEALED])
            checksum.update(view[HEADER_SIZE:])
            self.found[number] = checksum.intdigest()
        self._left[:] = False
        if (self.found != self._deltas.head["checksum"]).any():
            raise CorruptData("a delta does not match its checksum", DAMAGED)
