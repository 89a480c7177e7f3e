"""Classes of weights by the exponent of the old value, and which of them make the smallest delta.

Both sides of a delta know the old weights, and a weight changes the more often the smaller it is, so positions are
coded as ranks within classes of like density. A class is a range of exponents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.format import Array
from rillflow.kernels.delta.words import count_at_least

# Weights are looked at in blocks of this many, so that all of it happens in the processor's nearest cache.
BLOCK = 4096
# A class must save these bits: an estimate of its part of the table, and a share of all, because each takes time.
_CLASS_BITS, _CLASS_SHARE = 300.0, 0.004
_SAMPLE = 1 << 15
# A one in each of the four or two weights of a word, and what packs their bytes side by side.
_OF_FOUR, _OF_TWO = np.uint64(0x0001000100010001), np.uint64(0x0000000100000001)
_LOW_HALVES = np.uint64(0x0000FFFF0000FFFF)
_8, _16, _24 = np.uint64(8), np.uint64(16), np.uint64(24)


class Classes(NamedTuple):
    """The classes of a segment: the first exponent of each, how many exponents follow it; the class of an exponent."""

    mask: int
    start_C: Array
    span_C: Array
    class_E: Array

    @classmethod
    def of(cls, start_C: Array, mask: int) -> Classes:
        end_C = np.append(start_C[1:], mask + 1).astype(np.int64)
        class_E = np.repeat(np.arange(len(start_C), dtype=np.uint8), end_C - start_C)
        return cls(mask, start_C, (end_C - start_C - 1).astype(np.uint8), class_E)


@inlined
def fill_exponents(old_N: Array, block: int, mantissa: int, mask: int, exponent_B: Array) -> None:
    """Write the exponents of the weights of a block, and zeros where it has fewer than BLOCK."""
    each, count = 8 // old_N.itemsize, min(BLOCK, len(old_N) - block)
    whole, shift = count // each, np.uint64(mantissa)
    old_W = old_N[block : block + whole * each].view(np.uint64)
    if each == 4:
        fours, kept = exponent_B.view(np.uint32), np.uint64(mask) * _OF_FOUR
        for word in range(whole):
            lanes = (old_W[word] >> shift) & kept
            lanes = (lanes | (lanes >> _8)) & _LOW_HALVES
            fours[word] = lanes | (lanes >> _16)
    else:
        twos, kept = exponent_B.view(np.uint16), np.uint64(mask) * _OF_TWO
        for word in range(whole):
            lanes = (old_W[word] >> shift) & kept
            twos[word] = lanes | (lanes >> _24)
    for place in range(whole * each, count):
        exponent_B[place] = (old_N[block + place] >> mantissa) & mask
    for place in range(count, BLOCK):
        exponent_B[place] = 0


@inlined
def count_block(
    old_N: Array,
    block: int,
    mantissa: int,
    mask: int,
    start_C: Array,
    exponent_B: Array,
    total_C: Array,
    above_CR: Array,
    first_row: int,
) -> None:
    """Write, from `first_row` on, how many weights before every 64 of a block have at least the first exponent of class
    c. `total_C` has these counts before the block, and gets those after it."""
    fill_exponents(old_N, block, mantissa, mask, exponent_B)
    count = min(BLOCK, len(old_N) - block)
    for row in range((count + 63) // 64):
        above_CR[0, first_row + row] = block + 64 * row
        for number in range(1, len(start_C)):
            above_CR[number, first_row + row] = total_C[number]
            total_C[number] += count_at_least(exponent_B, 64 * row, start_C[number])
    total_C[0] = block + count


@compiled
def sampled_sizes(old_N: Array, mantissa: int, mask: int) -> Array:
    """Return about how many weights have each exponent: counted, or estimated from short runs of many weights."""
    size_E = np.zeros(mask + 1, np.int64)
    step = 64 * max(1, len(old_N) // _SAMPLE)
    for start in range(0, len(old_N), step):
        for at in range(start, min(start + 64, len(old_N))):
            size_E[(old_N[at] >> mantissa) & mask] += step // 64
    return size_E


@inlined
def _plogp(count: float) -> float:
    return count * np.log2(count) if count > 0.0 else 0.0


@compiled
def choose(size_E: Array, table_EL: Array) -> Array:
    """Return the first exponents of the classes (the first is 0) for which the estimated size is the least.

    `size_E` are the weights of each exponent, at least about, `table_EL` those that change, by the length of their
    change. All partitions into ranges are considered.
    """
    present = np.empty(len(size_E), np.int64)
    count = 0
    whole_S, tally_S = np.zeros(table_EL.shape[1] + 2), np.zeros(table_EL.shape[1] + 2)
    for exponent in range(len(size_E)):
        if _add(whole_S, size_E, table_EL, exponent):
            present[count] = exponent
            count += 1
    least, before = np.empty(count + 1), np.zeros(count + 1, np.int64)
    least[0] = 0.0
    each = _CLASS_BITS + _CLASS_SHARE * _bits(whole_S)
    for end in range(1, count + 1):
        least[end] = np.inf
        for place in range(len(tally_S)):
            tally_S[place] = 0.0
        for start in range(end - 1, -1, -1):
            _add(tally_S, size_E, table_EL, present[start])
            bits = each + least[start] + _bits(tally_S)
            if bits < least[end]:
                least[end] = bits
                before[end] = start
    return _path(before, count, present)


@inlined
def _add(tally_S: Array, size_E: Array, table_EL: Array, exponent: int) -> Any:
    """Add an exponent to a class: its changes by length, all of them, its weights; whether it has any."""
    changed = 0
    lengths = table_EL.shape[1]
    for length in range(lengths):
        tally_S[length] += table_EL[exponent, length]
        changed += table_EL[exponent, length]
    size = max(size_E[exponent], changed)  # an estimate may be too small
    tally_S[lengths] += changed
    tally_S[lengths + 1] += size
    return size > 0


@inlined
def _bits(tally_S: Array) -> float:
    """Return the bits of an ideal code for the positions and lengths of a class."""
    changed, size = tally_S[-2], tally_S[-1]
    bits = _plogp(size) - _plogp(size - changed)
    for length in range(len(tally_S) - 2):
        bits -= _plogp(tally_S[length])
    return bits


@inlined
def _path(before: Array, count: int, present: Array) -> Array:
    """The exponents that the chosen ranges begin at."""
    classes, end = 1, before[count]
    while end:
        classes, end = classes + 1, before[end]
    starts = np.zeros(classes, np.uint8)
    end = before[count]
    for number in range(classes - 1, 0, -1):
        starts[number] = present[end]
        end = before[end]
    return starts
