"""Subsets of ordered items in two bit streams, written and read. `format` documents the bits.

Streams are arrays of words of 64 bits that are zero behind what was written. Gaps are those of the members or, where
that is `inverted`, of the others; with the Rice parameter 0 they are a bitmap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.bits import highest
from rillflow.kernels.delta.format import MAX_RICE, Array

_1, _63 = np.uint64(1), np.uint64(63)


# ------------------------------------------------------------ writing


@inlined
def put(stream_W: Array, at: int, value: Any, width: int) -> None:
    """Write the lowest `width` (0 to 32) bits, which are all of `value`, from the bit `at` on."""
    word, shift = at >> 6, np.uint64(at & 63)
    stream_W[word] |= value << shift
    # A shift by 64 is undefined: by 1 and by 63 less.
    stream_W[word + 1] |= (value >> _1) >> (_63 - shift)


@compiled
def best_rice(gap_M: Array) -> tuple[int, int]:
    """The parameter that costs the fewest bits, near the logarithm of 0.69 times the mean gap, and its unary bits."""
    total = 0
    for gap in gap_M:
        total += gap
    guess = highest(np.uint64(max(1, int(0.98 * total / len(gap_M)))))
    rice, least, unary = 0, -1, 0
    for near in range(max(0, guess - 1), min(MAX_RICE, guess + 1) + 1):
        bits = len(gap_M)
        for gap in gap_M:
            bits += gap >> near
        if least < 0 or bits + near * len(gap_M) < least:
            rice, least, unary = near, bits + near * len(gap_M), bits
    return rice, unary


@compiled
def write_gaps(gap_M: Array, rice: int, unary_W: Array, unary_at: int, field_W: Array, field_at: int) -> None:
    low = (_1 << np.uint64(rice)) - _1
    for gap in gap_M:
        unary_at += gap >> rice
        unary_W[unary_at >> 6] |= _1 << np.uint64(unary_at & 63)
        unary_at += 1
    if rice:
        for gap in gap_M:
            put(field_W, field_at, np.uint64(gap) & low, rice)
            field_at += rice


@inlined
def put_run(gap_M: Array, at: int, first: int, count: int) -> None:
    """`count` gaps from `at` on: the first of them, then zeros."""
    gap_M[at] = first
    for place in range(at + 1, at + count):
        gap_M[place] = 0


# ------------------------------------------------------------ reading


@inlined
def get(stream_W: Array, at: int, width: int) -> Any:
    """Return the `width` (0 to 32) bits from `at` on; the stream must have another word behind them."""
    word, shift = at >> 6, np.uint64(at & 63)
    both = (stream_W[word] >> shift) | ((stream_W[word + 1] << _1) << (_63 - shift))
    return both & ((_1 << np.uint64(width)) - _1)
