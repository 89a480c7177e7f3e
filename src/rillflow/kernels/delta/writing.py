"""A segment of a delta, written: a run of weights, coded class by class. `format` documents the bytes.

First a pass over both tensors finds what changed; the classes are chosen from that; a pass over the old weights then
counts each class, because a change is coded by its rank in its class. The rest looks at changed weights only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.classes import BLOCK, Classes, choose, count_block, sampled_sizes
from rillflow.kernels.delta.format import Array, Coded, Layout
from rillflow.kernels.delta.words import (
    SPARE,
    best_rice,
    between,
    highest,
    mixed,
    ones,
    put,
    put_run,
    word_of,
    write_gaps,
)

_1, _3, _6, _63 = np.uint64(1), np.uint64(3), np.uint64(6), np.uint64(63)
# Places in the array that says how much is written: bytes of the table, bits of the streams, and whether all fitted.
_TABLE, _UNARY, _FIELD, _FULL = range(4)


def encode(old_N: Array, new_N: Array, layout: Layout, first_word: int) -> Coded:
    mantissa, mask = layout.mantissa, layout.exponents - 1
    position_K, change_K = (np.empty(len(old_N) + SPARE, np.int32) for _ in range(2))
    table_EL = np.zeros((layout.exponents, layout.width), np.int64)
    count, gained = _find(old_N, new_N, mantissa, mask, first_word, position_K, change_K, table_EL)
    if not count:
        return Coded(0, 0, ())
    start_C = choose(sampled_sizes(old_N, mantissa, mask), table_EL)
    classes = Classes.of(start_C, mask)
    count_C = np.add.reduceat(table_EL.sum(1), start_C)
    gap_K, sorted_K = np.empty(count, np.int32), np.empty(count, np.int32)
    size_C = np.empty(len(start_C), np.int64)
    _rank(old_N, mantissa, *classes, count_C, position_K[:count], change_K, gap_K, sorted_K, size_C)
    # Nearly always enough for a stream: four bytes a change.
    room, at = max(4 * count, 1024), np.zeros(4, np.int64)
    table_T = np.empty(len(start_C) * (1 + 6 * (layout.width + 1)) + 1, np.uint8)
    while True:
        unary_W, field_W = (np.zeros(room // 8 + 2, np.uint64) for _ in range(2))
        _write(start_C, size_C, count_C, gap_K, sorted_K, layout.width, table_T, unary_W, field_W, at)
        if not at[_FULL]:
            break
        if room >= old_N.nbytes:
            return Coded(count, int(gained), ())
        room *= 4
    unary = unary_W.view(np.uint8)[: (at[_UNARY] + 7) // 8].tobytes()
    field = field_W.view(np.uint8)[: (at[_FIELD] + 7) // 8].tobytes()
    pieces = (table_T[: at[_TABLE]].tobytes(), len(unary).to_bytes(4, "little"), unary, field)
    return Coded(count, int(gained), pieces if sum(map(len, pieces)) < old_N.nbytes else ())


# ------------------------------------------------------------ what changed

_GROUP = 8  # words


@inlined
def _differs(old_W: Array, new_W: Array, group: int) -> bool:
    """Return whether one of a group of words differs: without a branch for each, several are compared at once."""
    found = np.uint64(0)
    for word in range(_GROUP):
        place = np.uint64(group) + np.uint64(word)
        found |= old_W[place] ^ new_W[place]
    return bool(found != 0)


@compiled
def _find(
    old_N: Array,
    new_N: Array,
    mantissa: int,
    mask: int,
    first_word: int,
    position_K: Array,
    change_K: Array,
    table_EL: Array,
) -> tuple[int, Any]:
    """Places and changes of the weights that differ, and how many have which exponent and length; how many they are,
    and what the fingerprint gains."""
    each = 8 // old_N.itemsize
    whole = len(old_N) // each
    old_W, new_W = old_N[: whole * each].view(np.uint64), new_N[: whole * each].view(np.uint64)
    sign = np.int64(1) << (8 * old_N.itemsize - 1)
    full = 2 * sign - 1
    gained = np.uint64(0)
    last = -1
    end = 0
    for block in range(0, len(old_N), BLOCK):
        begin = end
        block_end = min(block + BLOCK, len(old_N))
        words_end = block_end // each
        for group in range(block // each, words_end, _GROUP):
            if group + _GROUP <= words_end and not _differs(old_W, new_W, group):
                continue
            for word in range(group, min(group + _GROUP, words_end)):
                if old_W[word] != new_W[word]:
                    for place in range(word * each, (word + 1) * each):
                        position_K[end] = place
                        end += old_N[place] != new_N[place]
        for place in range(block_end // each * each, block_end):
            position_K[end] = place
            end += old_N[place] != new_N[place]
        for k in range(begin, end):
            position: Any = np.int64(position_K[k])
            old, new = np.int64(old_N[np.uint64(position)]), np.int64(new_N[np.uint64(position)])
            was = full ^ old if old & sign else old | sign
            now = full ^ new if new & sign else new | sign
            change = ((now - was + sign) & full) - sign
            change_K[k] = change
            table_EL[np.uint64((old >> mantissa) & mask), np.uint64(highest(np.uint64(abs(change))))] += 1
            number = position // each
            if number != last:
                last = number
                before = old_W[np.uint64(number)] if number < whole else word_of(old_N, number)
                after = new_W[np.uint64(number)] if number < whole else word_of(new_N, number)
                gained += mixed(after, first_word + number) - mixed(before, first_word + number)
    return end, gained


@compiled
def _rank(
    old_N: Array,
    mantissa: int,
    mask: int,
    start_C: Array,
    span_C: Array,
    class_E: Array,
    count_C: Array,
    position_K: Array,
    change_K: Array,
    gap_K: Array,
    sorted_K: Array,
    size_C: Array,
) -> None:
    """Sort the changes by class, with the gaps between their ranks; the sizes of the classes."""
    classes = len(start_C)
    next_C, rank_C = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    for number in range(classes):
        rank_C[number] = -1
        if number:
            next_C[number] = next_C[number - 1] + count_C[number - 1]
    total_C = np.zeros(classes + 1, np.int64)
    # The row above the last class stays zero.
    above_CR = np.zeros((classes + 1, BLOCK // 64), np.int32)
    exponent_B = np.empty(BLOCK, np.uint8)
    exponent_W = exponent_B.view(np.uint64)
    k = 0
    for block in range(0, len(old_N), BLOCK):
        count_block(old_N, block, mantissa, mask, start_C, exponent_B, total_C, above_CR, 0)
        while k < len(position_K) and position_K[k] < block + BLOCK:
            inside = np.uint64(position_K[k] - block)
            row = inside >> _6
            mine = np.uint64(class_E[exponent_B[inside]])
            bits = between(exponent_W, row << _3, start_C[mine], span_C[mine])
            below = (_1 << (inside & _63)) - _1
            rank = np.int64(above_CR[mine, row]) - above_CR[mine + _1, row] + ones(bits & below)
            at = next_C[mine]
            gap_K[at] = rank - rank_C[mine] - 1
            sorted_K[at] = change_K[k]
            next_C[mine] = at + 1
            rank_C[mine] = rank
            k += 1
    for number in range(classes):
        size_C[number] = total_C[number] - total_C[number + 1]


# ------------------------------------------------------------ how it is written


@compiled
def _write(
    start_C: Array,
    size_C: Array,
    count_C: Array,
    gap_K: Array,
    change_K: Array,
    width: int,
    table_T: Array,
    unary_W: Array,
    field_W: Array,
    at: Array,
) -> None:
    """The table and the two streams, and how much of them is used."""
    for place in range(len(at)):
        at[place] = 0
    table_T[0] = len(start_C) - 1
    for number in range(1, len(start_C)):
        table_T[number] = start_C[number]
    at[_TABLE] = len(start_C)
    scratch_K, other_K = np.empty(len(gap_K), np.int32), np.empty(len(gap_K), np.int32)
    long_K, left_K = np.empty(len(gap_K), np.int64), np.empty(len(gap_K), np.int64)
    end = 0
    for number in range(len(start_C)):
        begin, end = end, end + count_C[number]
        _subset(gap_K[begin:end], size_C[number], other_K, table_T, unary_W, field_W, at)
        if end > begin:
            _changes(change_K[begin:end], scratch_K, other_K, long_K, left_K, width, table_T, unary_W, field_W, at)


@compiled
def _subset(
    gap_M: Array, total: int, other_K: Array, table_T: Array, unary_W: Array, field_W: Array, at: Array
) -> None:
    """A subset of `total` items by the gaps before its members."""
    number = len(gap_M)
    while number > 0x7F:
        table_T[at[_TABLE]] = number & 0x7F | 0x80
        at[_TABLE] += 1
        number >>= 7
    table_T[at[_TABLE]] = number
    at[_TABLE] += 1
    if len(gap_M) == 0 or len(gap_M) == total or at[_FULL]:
        return
    inverted = 2 * len(gap_M) > total
    if inverted:
        gap_M = other_K[: _inverted(gap_M, total, other_K)]
    rice, unary_bits = best_rice(gap_M)
    room = 64 * (len(unary_W) - 2)
    if at[_UNARY] + unary_bits > room or at[_FIELD] + rice * len(gap_M) > room:
        at[_FULL] = 1
        return
    table_T[at[_TABLE]] = rice | (0x80 if inverted else 0)
    at[_TABLE] += 1
    write_gaps(gap_M, rice, unary_W, at[_UNARY], field_W, at[_FIELD])
    at[_UNARY] += unary_bits
    at[_FIELD] += rice * len(gap_M)


@compiled
def _inverted(gap_M: Array, total: int, other_K: Array) -> int:
    """Write the gaps before the non-members; return how many there are."""
    count = run = 0
    for gap in gap_M:
        if gap:
            put_run(other_K, count, run, gap)
            count += gap
            run = 0
        run += 1
    rest = total - len(gap_M) - count
    if rest:
        put_run(other_K, count, run, rest)
    return count + rest


@compiled
def _changes(
    change_M: Array,
    scratch_K: Array,
    other_K: Array,
    long_K: Array,
    left_K: Array,
    width: int,
    table_T: Array,
    unary_W: Array,
    field_W: Array,
    at: Array,
) -> None:
    """Signs, lengths and low bits of a class's changes."""
    count, last = 0, -1
    for m in range(len(change_M)):
        scratch_K[count] = m - last - 1
        count, last = (count + 1, m) if change_M[m] < 0 else (count, last)
    _subset(scratch_K[:count], len(change_M), other_K, table_T, unary_W, field_W, at)

    count, last = 0, -1
    for m in range(len(change_M)):
        size = abs(np.int64(change_M[m]))
        scratch_K[count] = m - last - 1
        long_K[count] = size
        count, last = (count + 1, m) if size > 1 else (count, last)
    _subset(scratch_K[:count], len(change_M), other_K, table_T, unary_W, field_W, at)

    longer = left = count
    for m in range(longer):
        left_K[m] = long_K[m]
    for length in range(1, width - 1):
        if not left:
            break
        count, last = 0, -1
        for m in range(left):
            size = left_K[m]
            scratch_K[count] = m - last - 1
            left_K[count] = size
            count, last = (count + 1, m) if size >> (length + 1) else (count, last)
        _subset(scratch_K[:count], left, other_K, table_T, unary_W, field_W, at)
        left = count
    _low_bits(long_K[:longer], width, field_W, at)


@compiled
def _low_bits(size_M: Array, width: int, field_W: Array, at: Array) -> None:
    """The low bits of sizes above 1, those of the same length together."""
    first_L = np.zeros(width + 1, np.int64)
    for size in size_M:
        length = highest(np.uint64(size))
        first_L[length + 1] += length
    first_L[0] = at[_FIELD]
    for length in range(width):
        first_L[length + 1] += first_L[length]
    if first_L[width] > 64 * (len(field_W) - 2) or at[_FULL]:
        at[_FULL] = 1
        return
    for size in size_M:
        length = highest(np.uint64(size))
        put(field_W, first_L[length], np.uint64(size) ^ (_1 << np.uint64(length)), length)
        first_L[length] += length
    at[_FIELD] = first_L[width]
