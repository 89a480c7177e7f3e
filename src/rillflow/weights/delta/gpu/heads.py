"""The heads of deltas and of their segments, read before anything else, and the checksums, which may come last.

The first kernel needs nothing but heads, so the device has work while the bytes are copied and their checksums are
computed. Until then a head may be damaged: reading one is safe whatever it says, and before an error about what it says
is raised, its checksum must be asked for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import xxhash

from rillflow.errors import CorruptData
from rillflow.weights.delta.format import DAMAGED, LEAST_LOG2, MAGIC, MOST_LOG2, RAW, SAME, Buffer, Header
from rillflow.weights.delta.gpu.batch import Array

# `format` says what they are.
HEAD = np.dtype(
    [
        ("magic", "S4"), ("dtype", "u1"), ("log2", "u1"), ("weights", "<u8"), ("base", "<u8"), ("result", "<u8"),
        ("checksum", "<u8"),
    ]
)  # fmt: skip
_SEALED = HEAD.itemsize - 8
_SEGMENT = struct.Struct("<BI")
# The starts of all classes are within so many bytes of a segment.
FIRST_BYTES = 256
THREADS = 4
# So many bytes and more have their checksums computed by several threads, which need no lock of the interpreter.
MANY = 1 << 22


class Segments(NamedTuple):
    """Of each segment, its kind, where its bytes begin in its delta, how many there are, and the first ones (which may
    be followed by others)."""

    kind: Array
    begin: Array
    size: Array
    first: Array


def views_of(deltas: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(data).cast("B") for data in deltas]


def headers(views: Sequence[memoryview]) -> Array:
    """One row of `HEAD` for each."""
    parts = [view[: HEAD.itemsize] for view in views]
    if any(len(part) < HEAD.itemsize for part in parts):
        raise CorruptData("these bytes are no delta", DAMAGED)
    found = np.frombuffer(b"".join(parts), HEAD)
    if (found["magic"] != MAGIC).any():
        raise CorruptData("these bytes are no delta", DAMAGED)
    if found["log2"].min(initial=LEAST_LOG2) < LEAST_LOG2 or found["log2"].max(initial=0) > MOST_LOG2:
        raise CorruptData("a delta has segments of an impossible size", DAMAGED)
    return found


def header_of(row: Array) -> Header:
    return Header(*row.tolist()[1:-1])


def segments(views: Sequence[memoryview], numbers: Sequence[int]) -> Segments:
    """The segments of all deltas, of so many each, which must be all there is."""
    heads: list[tuple[int, int, int]] = []
    first: list[bytes | memoryview] = []
    unpack = _SEGMENT.unpack_from
    for view, number in zip(views, numbers, strict=True):
        at, end = HEAD.itemsize, len(view)
        for _ in range(number):
            if at + _SEGMENT.size > end:
                raise CorruptData("a delta ends too early", DAMAGED)
            kind, size = unpack(view, at)
            at += _SEGMENT.size
            heads.append((kind, at, size))
            part = view[at : at + FIRST_BYTES]
            first.append(part if len(part) == FIRST_BYTES else bytes(part).ljust(FIRST_BYTES, b"\0"))
            at += size
        if at != end:
            raise CorruptData("a delta is shorter or longer than its segments", DAMAGED)
    kind_S, begin_S, size_S = np.array(heads, np.int64).reshape(-1, 3).T
    if ((kind_S > RAW) | ((kind_S == SAME) & (size_S > 0))).any():
        raise CorruptData("a delta has a segment of an unknown kind", DAMAGED)
    return Segments(kind_S, begin_S, size_S, np.frombuffer(b"".join(first), np.uint8))


@cache
def pool() -> ThreadPoolExecutor:
    """Threads that stay: to start them for each call would take as long as what they do."""
    return ThreadPoolExecutor(THREADS, "rillflow-delta")


# A fork has none of them.
os.register_at_fork(after_in_child=pool.cache_clear)


class Checksums:
    """Whether the bytes of all deltas are those that were written. Few bytes are looked at here and now, many when
    `start` is called, by other threads."""

    def __init__(self, views: Sequence[memoryview], heads: Array) -> None:
        self._views, self._expected = views, heads["checksum"].tolist()
        self._left = sorted(range(len(views)), key=lambda number: len(views[number]))
        self._under_way: list[Future[bool]] = []
        if sum(map(len, views)) < MANY:
            self.wait()

    def start(self) -> None:
        if self._left and not self._under_way:
            self._under_way = [pool().submit(self._check) for _ in range(THREADS)]

    def wait(self) -> None:
        """CorruptData unless all are right."""
        good = [self._check(), *(share.result() for share in self._under_way)]
        if not all(good):
            raise CorruptData("a delta does not match its checksum", DAMAGED)

    def _check(self) -> bool:
        """Look at those that are left, the largest first, until none is."""
        good = True
        while self._left:
            try:
                number = self._left.pop()
            except IndexError:  # another thread took it
                break
            view = self._views[number]
            checksum = xxhash.xxh3_64(view[:_SEALED])
            checksum.update(view[HEAD.itemsize :])
            good &= checksum.intdigest() == self._expected[number]
        return good
