"""Where the member of a given rank is, without a branch: nobody could foretell which way it goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.weights.delta.format import Array
from rillflow.weights.delta.jit import inlined

_0, _1 = np.uint64(0), np.uint64(1)
_STEPS = tuple(np.uint64(step) for step in (32, 16, 8, 4, 2, 1))
# Where the first, second, … bit of a byte is.
_SELECT = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.uint64
).reshape(-1)
_5, _3, _F = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_EACH, _TOP = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_2, _3_BITS, _4, _7, _8, _56, _255 = (np.uint64(value) for value in (2, 3, 4, 7, 8, 56, 255))


@inlined
def row_of(before_R: Array, rank: int) -> Any:
    """The last of 64 rows with at most `rank` before it; the first has."""
    row = np.uint64(0)
    for step in _STEPS:
        row += step if before_R[row + step] <= rank else _0
    return row


@inlined
def select(bits: Any, rank: Any) -> Any:
    """The place of the set bit of this rank, which is there."""
    counts = bits - ((bits >> _1) & _5)
    counts = (counts & _3) + ((counts >> _2) & _3)
    sums = ((counts + (counts >> _4)) & _F) * _EACH  # each byte: the ones in it and those below
    passed = (((rank * _EACH) | _TOP) - sums) & _TOP  # a mark in each byte that the rank is not in, nor below
    shift = (((passed >> _7) * _EACH) >> _56) << _3_BITS
    before = ((sums << _8) >> shift) & _255
    return shift | _SELECT[(((bits >> shift) & _255) << _3_BITS) | (rank - before)]
