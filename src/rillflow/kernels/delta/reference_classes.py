"""Classes of weights in numpy, for `reference`: the class of a weight, its rank there, and the cheapest classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rillflow.kernels.delta.format import Array, Layout

# A class must save these bits: an estimate of its part of the table, and a share of all, because each takes time.
_CLASS_BITS, _CLASS_SHARE = 300, 0.004
_SAMPLE = 1 << 16
_BLOCK = 1 << 17
# Listing all members of a class costs as much as finding this share of them one by one.
_DENSE = 8


def unsigned(layout: Layout) -> np.dtype[Any]:
    return np.dtype(np.uint16 if layout.width == 16 else np.uint32)


def exponents(bits_N: Array, layout: Layout) -> Array:
    """The exponent field of each weight, as bytes: the cast cuts off the sign above 8-bit exponents."""
    shifted: Array = (bits_N >> bits_N.dtype.type(layout.mantissa)).astype(np.uint8)
    return shifted if layout.exponent == 8 else shifted & np.uint8(layout.exponents - 1)


class Classes:
    """The classes of the weights with the bits `old_N`; class c begins at exponent `starts[c]`, the first at 0."""

    def __init__(self, old_N: Array, starts: Sequence[int], layout: Layout) -> None:
        self._old_N, self._layout = old_N, layout
        self._class_E = np.searchsorted(starts, np.arange(layout.exponents), side="right") - 1
        self._words_CW = _words(old_N, starts, layout)
        counts_CW = np.bitwise_count(self._words_CW)
        self._sums_CW = np.zeros((len(starts), counts_CW.shape[1] + 1), np.int32)
        np.cumsum(counts_CW, axis=1, out=self._sums_CW[:, 1:])

    def size(self, number: int) -> int:
        return int(self._sums_CW[number, -1])

    def numbers(self, positions: Array) -> Array:
        """The class of each of these weights."""
        return self._class_E[exponents(self._old_N[positions], self._layout)]

    def ranks(self, number: int, positions: Array) -> Array:
        """How many weights of the class come before each of these, which are all of it."""
        at = positions >> 6
        below = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        inside: Array = np.bitwise_count(self._words_CW[number][at] & below).astype(np.int64)
        inside += self._sums_CW[number][at]
        return inside

    def positions(self, ranks_C: Sequence[Array]) -> list[Array]:
        """The inverse of `ranks`, for ascending ranks below the size of each class."""
        dense = [number for number, ranks in enumerate(ranks_C) if len(ranks) * _DENSE > self.size(number)]
        found = [
            np.zeros(0, np.int64) if number in dense else self._find(number, r) for number, r in enumerate(ranks_C)
        ]
        if dense:
            union = np.bitwise_or.reduce(self._words_CW[dense])
            members = np.flatnonzero(np.unpackbits(union.view(np.uint8), bitorder="little").view(np.bool_))
            numbers = self.numbers(members)
            for number in dense:
                mine = members[numbers == number]
                found[number] = mine if len(mine) == len(ranks_C[number]) else mine[ranks_C[number]]
        return found

    def _find(self, number: int, ranks: Array) -> Array:
        sums = self._sums_CW[number]
        at = np.searchsorted(sums, ranks.astype(np.int32), side="right") - 1
        return at * 64 + _select(self._words_CW[number][at], ranks - sums[at])


def _words(old_N: Array, starts: Sequence[int], layout: Layout) -> Array:
    """For each class a bit a weight, block by block, so that all of it happens in the processor's cache."""
    words_CW = np.zeros((len(starts), (len(old_N) + 63) // 64), np.uint64)
    bytes_CB = words_CW.view(np.uint8)
    bytes_CB[0, : len(old_N) // 8] = 0xFF
    if len(old_N) % 8:
        bytes_CB[0, len(old_N) // 8] = (1 << len(old_N) % 8) - 1
    for start in range(0, len(old_N), _BLOCK):
        exponent_N = exponents(old_N[start : start + _BLOCK], layout)
        at = slice(start // 8, start // 8 + (len(exponent_N) + 7) // 8)
        for number in range(1, len(starts)):
            bytes_CB[number, at] = np.packbits(exponent_N >= np.uint8(starts[number]), bitorder="little")
    for number in range(len(starts) - 1):
        words_CW[number] &= ~words_CW[number + 1]
    return words_CW


def _select(words: Array, ranks: Array) -> Array:
    """Return the place of the bit of that rank in each word, by halving."""
    found = np.zeros(len(words), np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        low = words & np.uint64((1 << step) - 1)
        count = np.bitwise_count(low)
        beyond = ranks >= count
        ranks = ranks - np.where(beyond, count, 0)
        words = np.where(beyond, words >> np.uint64(step), low)
        found += np.where(beyond, step, 0)
    return found


def choose(old_N: Array, changed: Array, length_K: Array, layout: Layout) -> list[int]:
    """Where the classes begin, such that the estimated size is the least: all partitions into ranges are considered.

    `changed` are the positions of changed weights, `length_K` the bit lengths of their changes.
    """
    step = max(1, len(old_N) // _SAMPLE)
    size_E = np.bincount(exponents(old_N[::step], layout), minlength=layout.exponents).astype(np.float64) * step
    exponent_K = exponents(old_N[changed], layout).astype(np.int64)
    table_EL = np.bincount(exponent_K * layout.width + length_K, minlength=layout.exponents * layout.width)
    table_EL = table_EL.reshape(layout.exponents, layout.width).astype(np.float64)
    size_E = np.maximum(size_E, table_EL.sum(1))
    present = np.flatnonzero(size_E)
    cost = _costs(size_E[present], table_EL[present])
    return [0, *(int(present[start]) for start in _partition(cost)[1:])]


def _costs(size_E: Array, table_EL: Array) -> Array:
    """Bits of a class that has the exponents from i up to but without j."""
    sizes = np.concatenate([[0.0], np.cumsum(size_E)])
    tables = np.concatenate([np.zeros((1, table_EL.shape[1])), np.cumsum(table_EL, 0)])
    size = sizes[None, :] - sizes[:, None]
    changed = tables.sum(1)[None, :] - tables.sum(1)[:, None]
    lengths = -_plogp(changed)
    for column in tables.T:  # one by one: all of them at once would be large
        lengths += _plogp(column[None, :] - column[:, None])
    positions = _plogp(changed) + _plogp(size - changed) - _plogp(size)
    bits: Array = -positions - lengths
    bits += _CLASS_BITS + _CLASS_SHARE * bits[0, -1]
    return bits


def _plogp(counts: Array) -> Array:
    counts = np.maximum(counts, 0.0)  # half of the matrix is not used
    logs: Array = np.log2(counts, out=np.zeros_like(counts), where=counts > 0)
    return counts * logs


def _partition(cost: Array) -> list[int]:
    """The starts of the cheapest ranges that cover everything."""
    count = len(cost) - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    before = [0] * (count + 1)
    for end in range(1, count + 1):
        totals = best[:end] + cost[:end, end]
        before[end] = int(np.argmin(totals))
        best[end] = totals[before[end]]
    starts = [before[count]]
    while starts[-1]:
        starts.append(before[starts[-1]])
    return starts[::-1]
