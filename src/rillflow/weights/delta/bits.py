"""Bit streams without a loop over their items. The lowest bit of a byte comes first, in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.errors import CorruptData

Array = npt.NDArray[Any]
DAMAGED = "the delta is damaged: fetch it again, or pull the whole version"


def pack_unary(quotients: Sequence[Array]) -> bytes:
    """Each number as that many zeros and a one."""
    if not quotients:
        return b""
    ends = np.cumsum(np.concatenate(quotients) + 1)
    bits = np.zeros(int(ends[-1]), np.bool_)
    bits[ends - 1] = True
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_unary(data: memoryview, count: int) -> Array:
    """The `count` numbers that `data` holds; CorruptData when it holds more, fewer or anything after them."""
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_))
    if len(ones) != count or len(data) != (int(ones[-1]) // 8 + 1 if count else 0):
        raise CorruptData(f"a delta has {len(ones)} gaps instead of {count}", DAMAGED)
    return np.diff(ones, prepend=-1) - 1


def pack_fields(fields: Sequence[tuple[Array, int]]) -> bytes:
    """Arrays of numbers below 2**width, each number in `width` (1 to 32) bits, without any space between."""
    if not fields:
        return b""
    values = np.concatenate([values.astype(np.uint64) for values, _ in fields])
    widths = np.repeat([width for _, width in fields], [len(values) for values, _ in fields]).astype(np.uint64)
    ends = np.cumsum(widths, dtype=np.uint64)
    total = int(ends[-1]) if len(ends) else 0
    starts = ends - widths
    at, shifts = (starts >> np.uint64(6)).astype(np.int64), starts & np.uint64(63)
    words = np.zeros(total // 64 + 2, np.uint64)
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    if total:
        words[at[firsts]] = np.bitwise_or.reduceat(values << shifts, firsts)
    # Only the last number that begins in a word can reach into the next one, so no index repeats.
    over = np.flatnonzero(shifts + widths > 64)
    words[at[over] + 1] |= values[over] >> (np.uint64(64) - shifts[over])
    return words.view(np.uint8)[: (total + 7) // 8].tobytes()


class Fields:
    """Reads what `pack_fields` wrote, array by array."""

    def __init__(self, data: memoryview) -> None:
        self._words = np.zeros(len(data) // 8 + 2, np.uint64)
        self._words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._at = 0

    def take(self, count: int, width: int) -> Array:
        """The next `count` numbers. The caller has checked that `data` holds the bits of all arrays it takes."""
        if not width:
            return np.zeros(count, np.int64)
        starts = np.arange(self._at, self._at + count * width, width)
        self._at += count * width
        at, shifts = starts >> 6, (starts & 63).astype(np.uint64)
        # Shifting by 64 is undefined: the second word moves by 1 and by 63 less than its share.
        high = (self._words[at + 1] << np.uint64(1)) << (np.uint64(63) - shifts)
        values: Array = ((self._words[at] >> shifts) | high) & np.uint64((1 << width) - 1)
        return values.astype(np.int64)
