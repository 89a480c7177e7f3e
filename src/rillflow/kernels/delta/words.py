"""Words of 64 bits: the sums of fingerprints, the bits of words, and subsets of ordered items in two bit streams.

Fingerprints (the compiled part of `weights.fingerprint`) are sums of mixed words of 8 bytes, the last one padded.
`union` joins two lists of places.

`format` documents the bits of streams. A word is 64 flags, or eight bytes in each arithmetic operation. Places in
arrays are those of whole words; the caller knows that they are inside. Streams are arrays of words that are zero behind
what was written. Gaps are those of the members or, where that is `inverted`, of the others; with the Rice parameter 0
they are a bitmap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.format import MAX_RICE, Array

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
SPARE = 4  # items that `write_places` may write behind the last place
_0, _1, _2, _4, _7, _8, _56 = (np.uint64(value) for value in (0, 1, 2, 4, 7, 8, 56))
_3_BITS, _255 = np.uint64(3), np.uint64(255)
_5555, _3333, _0F0F = (np.uint64(value) for value in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
_EACH, _TOP = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # the lowest, the highest bit of each byte
_REST = np.uint64(0x7F7F7F7F7F7F7F7F)
_GATHER = np.uint64(0x0102040810204080)  # times the lowest bits of eight bytes: these bits side by side in the top byte
_STEPS = tuple(np.uint64(step) for step in (32, 16, 8, 4, 2, 1))
# The place of the first, second, … bit of each byte.
_SELECT = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.uint64
).reshape(-1)


@inlined
def mixed(word: Any, number: int) -> Any:
    """Return what the word of this number, counted from 0, adds to the fingerprint."""
    z = word + np.uint64(number + 1) * _STEP
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@inlined
def word_of(weights_N: Array, number: int) -> Any:
    """The word of this number; `weights_N` are unsigned integers of 1, 2, 4 or 8 bytes."""
    each = 8 // weights_N.itemsize
    word = np.uint64(0)
    for place in range(each):
        at = number * each + place
        if at < len(weights_N):
            word |= np.uint64(weights_N[at]) << np.uint64(place * 8 * weights_N.itemsize)
    return word


@compiled
def total(words_W: Array, first_word: int) -> Any:
    """The sum over whole words that begin at `first_word` of their tensor."""
    found = np.uint64(0)
    for number in range(len(words_W)):
        found += mixed(words_W[number], first_word + number)
    return found


@compiled
def gained(old_W: Array, new_W: Array, first_word: int) -> Any:
    """Return what the sum gains when words become others; only those that differ are mixed."""
    found = np.uint64(0)
    for number in range(len(old_W)):
        if old_W[number] != new_W[number]:
            found += mixed(new_W[number], first_word + number) - mixed(old_W[number], first_word + number)
    return found


@compiled
def difference(weights_N: Array, index_K: Array, value_K: Array, first_word: int) -> Any:
    """Return what the fingerprint gains when the weights at `index_K`, ascending and inside, become `value_K`."""
    each = 8 // weights_N.itemsize
    found = np.uint64(0)
    at = 0
    while at < len(index_K):
        number = index_K[at] // each
        before = word_of(weights_N, number)
        after = before
        while at < len(index_K) and index_K[at] // each == number:
            flip = np.uint64(weights_N[index_K[at]] ^ value_K[at])
            after ^= flip << np.uint64((index_K[at] - number * each) * 8 * weights_N.itemsize)
            at += 1
        found += mixed(after, first_word + number) - mixed(before, first_word + number)
    return found


@compiled
def union(one_K: Array, other_K: Array) -> Array:
    index_K = np.empty(len(one_K) + len(other_K), np.int64)
    end = at = beside = 0
    while at < len(one_K) and beside < len(other_K):
        first, second = one_K[at], other_K[beside]
        index_K[end] = min(first, second)
        end += 1
        at += first <= second
        beside += second <= first
    for rest_K in (one_K[at:], other_K[beside:]):
        for place in rest_K:
            index_K[end] = place
            end += 1
    return index_K[:end]


@inlined
def ones(word: Any) -> Any:
    """Return how many bits are set."""
    pairs = word - ((word >> _1) & _5555)
    fours = (pairs & _3333) + ((pairs >> _2) & _3333)
    return np.int64((((fours + (fours >> _4)) & _0F0F) * _EACH) >> _56)


@inlined
def lowest(word: Any) -> Any:
    """Return the place of the lowest bit that is set, or 64."""
    return ones(~word & (word - _1))


@inlined
def highest(number: Any) -> Any:
    """Return floor(log2) of an unsigned number between 1 and 2**53: the exponent of the float."""
    return (np.float64(number).view(np.int64) >> 52) - 1023


@inlined
def write_places(bits: Any, start: int, out: Array, at: Any) -> Any:
    """Write the places of the set bits, counted from `start`, into `out` from `at` on; return the index behind them.
    Up to SPARE items behind that are overwritten: a loop of fixed length is faster than one that stops exactly."""
    if not bits:
        return at
    end = at + ones(bits)
    while bits:
        for _ in range(SPARE):
            out[at] = start + lowest(bits)
            bits &= bits - _1
            at += 1
    return end


@inlined
def _at_least(bytes_8: Any, limits_8: Any) -> Any:
    """Return a word with the highest bit of each byte that is not below the byte of `limits_8` in its place."""
    of_rest = (bytes_8 | _TOP) - (limits_8 & _REST)  # no byte borrows from the next
    return ((bytes_8 & ~limits_8) | (~(bytes_8 ^ limits_8) & of_rest)) & _TOP


@inlined
def count_at_least(bytes_B: Array, first: Any, low: Any) -> Any:
    """Return how many of the 64 bytes from `first` on are not below `low`. Sums are bytes and places unsigned, so that
    one instruction does many bytes."""
    count = np.uint8(0)
    for place in range(64):
        count = np.uint8(count + np.uint8(bytes_B[np.uint64(first) + np.uint64(place)] >= low))
    return np.int64(count)


@inlined
def between(bytes_W: Array, first: Any, low: Any, span: Any) -> Any:
    """Return a bit for each of the 64 bytes from the word `first` on that is between `low` and `low + span`."""
    lows = np.uint64(low) * _EACH
    highs = lows + np.uint64(span) * _EACH  # no byte overflows: `low + span` is a byte
    found = _0
    for word in range(8):
        bytes_8 = bytes_W[np.uint64(first) + np.uint64(word)]
        inside = _at_least(bytes_8, lows) & _at_least(highs, bytes_8)
        found |= (((inside >> _7) * _GATHER) >> _56) << np.uint64(8 * word)
    return found


@inlined
def row_of(before_R: Array, rank: int) -> Any:
    """Return the last of 64 rows that has at most `rank` items before it; the first row has. Without a branch."""
    row = _0
    for step in _STEPS:
        row += step if before_R[row + step] <= rank else _0
    return row


@inlined
def select(bits: Any, rank: Any) -> Any:
    """Return the place of the set bit of this rank, which exists. Without a branch."""
    counts = bits - ((bits >> _1) & _5555)
    counts = (counts & _3333) + ((counts >> _2) & _3333)
    sums = ((counts + (counts >> _4)) & _0F0F) * _EACH  # each byte: the ones in it and those below
    passed = (((rank * _EACH) | _TOP) - sums) & _TOP  # a mark in each byte that the rank is not in, nor below
    shift = (((passed >> _7) * _EACH) >> _56) << _3_BITS
    before = ((sums << _8) >> shift) & _255
    return shift | _SELECT[(((bits >> shift) & _255) << _3_BITS) | (rank - before)]


# ------------------------------------------------------------ subsets

_63 = np.uint64(63)


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
