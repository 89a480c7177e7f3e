"""Kernels that go over the blocks of weights while deltas are read: how many weights of each class there are, which
weights the changed ranks mean, and what becomes of them.

The table of segments and the places of blocks are those of `compare`. A block's cells are in groups of eight. A byte
for each cell and class says how many weights of the class the group has before the cell, a 16-bit number for each group
and class how many the block has before the group: so a weight is found from its rank in the block by eight comparisons.

A record is `place in the block << WIDTH | new bits`, of 32 bits where weights have 16, else of 64. Whatever the ranks
are, nothing outside of the arrays is read or written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.weights.delta.gpu.cells import HIGH, at_least, four_times, halved, in_byte, reaches
from rillflow.weights.delta.gpu.single import ones_of
from rillflow.weights.delta.gpu.words import (
    changed_bits,
    evens,
    exponents_of,
    field_of,
    half,
    mixed,
    words_at,
)

GROUP = tl.constexpr(8)


@triton.jit
def _high_and_low(words, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """The exponents of each word's weights, a byte each: their high bits and all others. The bytes are of the weights
    0, 2, 1, 3; or where there are two, of 0, 1 and of none."""
    first = exponents_of(half(words, 0), WIDTH, MANTISSA, EXPONENTS)
    second = exponents_of(half(words, 1), WIDTH, MANTISSA, EXPONENTS)
    return halved(first | (second << 8))


@triton.jit
def sizes(
    table, owner, limits, cells, groups, out, sums, WORDS: tl.constexpr, CLASSES: tl.constexpr, SUM: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """How many weights of each class a block has; how many come before each cell and each group of cells.
    With SUM, also the block's part of the fingerprint."""
    GROUPS: tl.constexpr = WORDS // (4 * GROUP)
    b = tl.program_id(0)
    s = tl.load(owner + b)
    weights, first = tl.load(table + s * 8 + 2).to(tl.int32), tl.load(table + s * 8 + 4).to(tl.int32)
    address = tl.load(table + s * 8)
    low, high, last = tl.load(limits + s * 3), tl.load(limits + s * 3 + 1), tl.load(limits + s * 3 + 2)
    group = tl.arange(0, GROUPS)
    cell = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = (b - first) * WORDS + cell * 4
    x_0, x_1 = words_at(address, at, weights, LANES), words_at(address, at + 1, weights, LANES)
    x_2, x_3 = words_at(address, at + 2, weights, LANES), words_at(address, at + 3, weights, LANES)
    if SUM:
        place = tl.load(table + s * 8 + 3) + at
        sum = mixed(x_0, place, at * LANES < weights) + mixed(x_1, place + 1, (at + 1) * LANES < weights)
        sum += mixed(x_2, place + 2, (at + 2) * LANES < weights) + mixed(x_3, place + 3, (at + 3) * LANES < weights)
        tl.atomic_add(sums + s * 2, tl.sum(tl.sum(sum, 1), 0), sem="relaxed")
    high_0, low_0 = _high_and_low(x_0, WIDTH, MANTISSA, EXPONENTS)
    high_1, low_1 = _high_and_low(x_1, WIDTH, MANTISSA, EXPONENTS)
    high_2, low_2 = _high_and_low(x_2, WIDTH, MANTISSA, EXPONENTS)
    high_3, low_3 = _high_and_low(x_3, WIDTH, MANTISSA, EXPONENTS)
    # How many weights of the cell are of class c or above: four classes in each number, a byte each.
    inside = tl.minimum(tl.maximum(weights - at * LANES, 0), 4 * LANES)
    none = (inside * 0).to(tl.uint32)
    above_0, above_1, above_2, above_3 = none, none, none, none
    for i in tl.static_range(1, CLASSES):
        if CLASSES - i <= last:
            limit = four_times((low if CLASSES - i < 8 else high) >> (8 * ((CLASSES - i) % 8)))
            reached = at_least(high_0, low_0, limit, none)
            reached = at_least(high_1, low_1, limit, reached)
            reached = at_least(high_2, low_2, limit, reached)
            reached = in_byte(at_least(high_3, low_3, limit, reached), (CLASSES - i) % 4)
            if CLASSES - i < 4:
                above_0 += reached
            elif CLASSES - i < 8:
                above_1 += reached
            elif CLASSES - i < 12:
                above_2 += reached
            else:
                above_3 += reached
    above_0 += inside.to(tl.uint32)
    above = above_0.to(tl.int64) | (above_1.to(tl.int64) << 32)
    mine = b.to(tl.int64) * (WORDS // 4) + cell
    ours = b.to(tl.int64) * GROUPS + group
    c = tl.arange(0, CLASSES)
    shift = (c * 8).to(tl.int64)
    if CLASSES > 8:
        above_more = above_2.to(tl.int64) | (above_3.to(tl.int64) << 32)
        counts = above - ((above >> 8) | (above_more << 56))
        found = _before(counts, cells + mine * 2, groups + ours * 4, shift)
        more = _before(above_more - (above_more >> 8), cells + mine * 2 + 1, groups + ours * 4 + 2, shift)
        found = tl.where(c < 8, found, more)
    else:
        found = _before(above - (above >> 8), cells + mine, groups + ours * 2, shift)
    tl.store(out + first * CLASSES + c * tl.load(table + s * 8 + 5).to(tl.int32) + (b - first), found)


@triton.jit
def _before(counts, to_cells, to_groups, shift):
    """Store how many come before each cell in its group, and before each group; give how many there are of the classes
    that the shifts are of. The counts are those of eight classes, a byte each: no sum in a group exceeds 128."""
    tl.store(to_cells, tl.cumsum(counts, 1) - counts)
    of_group = tl.sum(counts, 1)
    even, odd = evens(of_group), evens(of_group >> 8)
    tl.store(to_groups, tl.cumsum(even, 0) - even)
    tl.store(to_groups + 1, tl.cumsum(odd, 0) - odd)
    return field_of(tl.sum(even, 0), tl.sum(odd, 0), shift)


@triton.jit(do_not_specialize=["number", "groups"])
def bounds(
    table, owner, sizes, changes_from, ranks, out, number, groups, CHUNK: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """Of each block and class, the first change of its weights: by search among the ranks, which ascend in a group.
    `sizes` are now what a group has before each block."""
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    valid = i < number
    s = tl.load(owner + i // CLASSES, mask=valid, other=0)
    first = tl.load(table + s * 8 + 4).to(tl.int32)
    blocks = tl.load(table + s * 8 + 5).to(tl.int32)
    c = tl.where(valid, (i - first * CLASSES) // blocks, 0)
    rank = tl.load(sizes + i, mask=valid, other=0)
    low = tl.load(changes_from + s * CLASSES + c, mask=valid, other=0).to(tl.int32)
    high = tl.load(changes_from + s * CLASSES + c + 1, mask=valid, other=0).to(tl.int32)
    while tl.max(high - low, 0) > 0:
        active = low < high
        middle = low + ((high - low) >> 1)
        less = tl.load(ranks + middle, mask=active, other=0) < rank
        low = tl.where(active & less, middle + 1, low)
        high = tl.where(active & (less == 0), middle, high)
    tl.store(out + i, low, mask=valid)
    tl.store(out + number, tl.load(changes_from + groups).to(tl.int32))


@triton.jit
def _changes_of(bounds, i):
    """How many changes the weights of a block and class have, if the ranks ascend; if they do not, any number."""
    return tl.maximum(tl.load(bounds + i + 1) - tl.load(bounds + i), 0)


@triton.jit
def _class_mask(words, c, limit, next_limit, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """Which weights of each word are of class c, between two limits: a bit each, in their order."""
    high, low = _high_and_low(words, WIDTH, MANTISSA, EXPONENTS)
    below = reaches(high, low, next_limit) ^ HIGH
    inside = tl.where(c == 0, below, below & reaches(high, low, limit)) >> 7
    if WIDTH == 16:
        # Bits 0, 16, 8 and 24 meet in this order in the highest four; no two of the products overlap.
        found = (inside * 0x10402080) >> 28
    else:
        found = (inside | (inside >> 7)) & 3
    return found.to(tl.int32)


@triton.jit
def _select(mask, rank):
    """Where the one-bit is, in a mask of 16 bits, before which there are `rank` of them."""
    place = tl.zeros_like(rank)
    for step in tl.static_range(4):
        ones = ones_of(mask & ((1 << (8 >> step)) - 1))
        beyond = rank >= ones
        rank = tl.where(beyond, rank - ones, rank)
        mask = tl.where(beyond, mask >> (8 >> step), mask)
        place = tl.where(beyond, place + (8 >> step), place)
    return place


@triton.jit
def _cell_of(cells, groups, c, rank, valid, GROUPS: tl.constexpr, CLASSES: tl.constexpr):
    """The cell of the weight of class c that has this rank in the block, and its rank in the cell."""
    tl.static_assert(GROUPS == 32)
    field = (c // 8) * 8 + (c & 1) * 4 + ((c & 7) >> 1)
    group, passed = tl.zeros_like(rank), tl.zeros_like(rank)
    for step in tl.static_range(5):
        next = group + (16 >> step)
        before = tl.load(groups + next * CLASSES + field, mask=valid, other=0).to(tl.int32)
        group = tl.where(before <= rank, next, group)
        passed = tl.where(before <= rank, before, passed)
    rank -= passed
    cell, passed = group * GROUP, tl.zeros_like(rank)
    for step in tl.static_range(3):
        next = cell + (4 >> step)
        before = tl.load(cells + next * CLASSES + c, mask=valid, other=0).to(tl.int32)
        cell = tl.where(before <= rank, next, cell)
        passed = tl.where(before <= rank, before, passed)
    return cell, rank - passed


@triton.jit
def _limit(limits, s, c, CLASSES: tl.constexpr):
    """Four times what the start of class c, not the first, is less than 256; of the one behind the last, 0."""
    packed = tl.load(limits + s * 3 + tl.where(c < 8, 0, 1), mask=c < CLASSES, other=0)
    return four_times(packed >> ((c & 7) * 8).to(tl.int64))


@triton.jit
def _located(
    table, limits, cells, groups, s, local, c, rank, change, valid, WORDS: tl.constexpr, CLASSES: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Places in the block, and new bits, of changed weights, given their classes and ranks in the block."""
    weights, address = tl.load(table + s * 8 + 2).to(tl.int32), tl.load(table + s * 8)
    cell, rank = _cell_of(cells, groups, c, rank, valid, WORDS // (4 * GROUP), CLASSES)
    limit, next_limit = _limit(limits, s, c, CLASSES), _limit(limits, s, c + 1, CLASSES)
    mask = tl.zeros_like(rank)
    for q in tl.static_range(4):
        x = words_at(address, local * WORDS + cell * 4 + q, weights, LANES)
        mask |= _class_mask(x, c, limit, next_limit, WIDTH, MANTISSA, EXPONENTS) << (q * LANES)
    place = cell * (4 * LANES) + tl.minimum(_select(mask, rank), 4 * LANES - 1)
    at = local * (WORDS * LANES) + place
    inside = valid & (at < weights)
    if WIDTH == 16:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    return place, changed_bits(bits, change.to(bits.dtype), WIDTH)


@triton.jit(do_not_specialize=["count", "number"])
def resolve(
    table, owner, limits, sizes, cells, groups, bounds, ranks, changes, out, begins, totals, flags, before, unordered,
    sums, report, count, number, WORDS: tl.constexpr, CHUNK: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """The records of each block's changes in the order of their places, where they begin and how many there are, and
    what they add to the fingerprint. Blocks take room among the records as they come.

    `flags`, `before` and `unordered` are scratch of each program: a bit for each weight of a block, the ones before
    each word of them, and records. The first number of the report is set to 1 for a fault, the second counts records.
    """
    FLAGS: tl.constexpr = WORDS * LANES // 32
    p = tl.program_id(0)
    flags += p * FLAGS
    before += p * FLAGS
    unordered += p * (WORDS * LANES)
    word = tl.arange(0, FLAGS)
    tl.store(flags + word, tl.zeros([FLAGS], tl.int32))
    tl.debug_barrier()
    b = p
    while b < count:
        s = tl.load(owner + b)
        first, blocks = tl.load(table + s * 8 + 4).to(tl.int32), tl.load(table + s * 8 + 5).to(tl.int32)
        total = b * 0
        for k in tl.static_range(CLASSES):
            total += _changes_of(bounds, first * CLASSES + k * blocks + (b - first))
        # More than there are weights is a fault, which the count of flags shows.
        total = tl.minimum(total, WORDS * LANES)
        tl.store(totals + b, total)
        if total > 0:
            start = tl.atomic_add(report + 1, total.to(tl.int64), sem="relaxed").to(tl.int32)
            tl.store(begins + b, start.to(tl.int64))
            _find(
                table, limits, sizes, cells.to(tl.pointer_type(tl.int8)) + b.to(tl.int64) * (WORDS // 4 * CLASSES),
                groups.to(tl.pointer_type(tl.int16)) + b.to(tl.int64) * (WORDS // 32 * CLASSES), bounds, ranks,
                changes, flags, unordered, s, b, total, WORDS, CHUNK, CLASSES, WIDTH, LANES, MANTISSA, EXPONENTS,
            )  # fmt: skip
            tl.debug_barrier()
            ones = ones_of(tl.load(flags + word, cache_modifier=".cg"))
            tl.store(before + word, tl.cumsum(ones, 0) - ones)
            # Two changes of one weight.
            tl.store(report, 1, mask=tl.sum(ones, 0) != total)
            tl.debug_barrier()
            _put_in_order(flags, before, unordered, out, start, total, number, CHUNK, WIDTH)
            tl.debug_barrier()
            tl.store(flags + word, tl.zeros([FLAGS], tl.int32))
            gained = _gained(table, out, s, b, start, tl.minimum(start + total, number), WORDS, CHUNK, WIDTH, LANES)
            tl.atomic_add(sums + s * 2 + 1, gained, sem="relaxed")
            tl.debug_barrier()
        b += tl.num_programs(0)


@triton.jit
def _find(
    table, limits, sizes, cells, groups, bounds, ranks, changes, flags, unordered, s, b, total, WORDS: tl.constexpr,
    CHUNK: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, MANTISSA: tl.constexpr,
    EXPONENTS: tl.constexpr,
):  # fmt: skip
    """The records of a block's changes, class by class, and a flag of each place."""
    first, blocks = tl.load(table + s * 8 + 4).to(tl.int32), tl.load(table + s * 8 + 5).to(tl.int32)
    start = total * 0
    while start < total:
        j = start + tl.arange(0, CHUNK)
        valid = j < total
        c, index, rank_from = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
        passed = total * 0
        for k in tl.static_range(CLASSES):
            here = first * CLASSES + k * blocks + (b - first)
            mine = j >= passed
            c = tl.where(mine, k, c)
            index = tl.where(mine, tl.load(bounds + here) + j - passed, index)
            rank_from = tl.where(mine, tl.load(sizes + here), rank_from)
            passed += _changes_of(bounds, here)
        rank = tl.load(ranks + index, mask=valid, other=0) - rank_from
        change = tl.load(changes + index, mask=valid, other=0)
        place, bits = _located(
            table, limits, cells, groups, s, b - first, c, rank, change, valid, WORDS, CLASSES, WIDTH, LANES, MANTISSA,
            EXPONENTS,
        )  # fmt: skip
        tl.store(unordered + j, (place.to(change.dtype) << WIDTH) | bits.to(change.dtype), mask=valid)
        flag = tl.full([CHUNK], 1, tl.int32) << (place & 31)
        tl.atomic_or(flags + (place >> 5), flag, mask=valid, sem="relaxed")
        start += CHUNK


@triton.jit
def _put_in_order(flags, before, unordered, out, start, total, number, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """A block's records, each behind as many as there are flags before its own."""
    done = total * 0
    while done < total:
        j = done + tl.arange(0, CHUNK)
        valid = j < total
        record = tl.load(unordered + j, mask=valid, other=0)
        place = (record >> WIDTH).to(tl.int32)
        below = (tl.full([CHUNK], 1, tl.int32) << (place & 31)) - 1
        to = start + tl.load(before + (place >> 5), mask=valid, other=0)
        to += ones_of(tl.load(flags + (place >> 5), mask=valid, other=0, cache_modifier=".cg") & below)
        tl.store(out + to, record, mask=valid & (to < number))
        done += CHUNK


@triton.jit
def _gained(
    table, records, s, b, start, end, WORDS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """What a block's records, from `start` to `end`, add to the fingerprint: the first of each word looks after it."""
    # LANES is 4 or 2.
    TO_WORD: tl.constexpr = WIDTH + LANES // 2
    weights, address = tl.load(table + s * 8 + 2).to(tl.int32), tl.load(table + s * 8)
    begin = (b - tl.load(table + s * 8 + 4).to(tl.int32)) * WORDS
    gained = tl.zeros([CHUNK], tl.int64)
    done = start
    while done < end:
        i = done + tl.arange(0, CHUNK)
        valid = i < end
        word = (tl.load(records + i, mask=valid, other=0) >> TO_WORD).to(tl.int32)
        before = (tl.load(records + i - 1, mask=valid & (i > start), other=0) >> TO_WORD).to(tl.int32)
        leads = valid & ((i == start) | (before != word))
        x = words_at(address, begin + word, weights, LANES)
        y = x
        for k in tl.static_range(LANES):
            mine = leads & (i + k < end)
            record = tl.load(records + i + k, mask=mine, other=0)
            shift = (((record >> WIDTH) & (LANES - 1)) * WIDTH).to(tl.int64)
            keep = ~(tl.full([CHUNK], (1 << WIDTH) - 1, tl.int64) << shift)
            changed = (y & keep) | ((record.to(tl.int64) & ((1 << WIDTH) - 1)) << shift)
            y = tl.where(mine & ((record >> TO_WORD).to(tl.int32) == word), changed, y)
        there = tl.load(table + s * 8 + 3) + (begin + word)
        gained += mixed(y, there, leads) - mixed(x, there, leads)
        done += CHUNK
    return tl.sum(gained, 0)


@triton.jit
def unpack(
    table, owner, begins, totals, runs, records, places, values, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of each record, where its weight is in its tensor, and the new bits. `runs` say where those of blocks go."""
    b = tl.program_id(0)
    s = tl.load(owner + b)
    begin = (tl.load(table + s * 8 + 3) + (b - tl.load(table + s * 8 + 4)) * WORDS) * LANES
    total, to = tl.load(totals + b), tl.load(runs + b)
    records += tl.load(begins + b, mask=total > 0, other=0)
    start = total * 0
    while start < total:
        i = start + tl.arange(0, CHUNK)
        record = tl.load(records + i, mask=i < total, other=0)
        tl.store(places + to + i, begin + (record >> WIDTH), mask=i < total)
        tl.store(values + to + i, record.to(values.dtype.element_ty), mask=i < total)
        start += CHUNK


@triton.jit
def scatter(
    table, owner, begins, totals, records, WORDS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write a block's new bits where they belong."""
    b = tl.program_id(0)
    s = tl.load(owner + b)
    to = tl.load(table + s * 8).to(tl.pointer_type(tl.int16 if WIDTH == 16 else tl.int32))
    to += (b - tl.load(table + s * 8 + 4)) * (WORDS * LANES)
    total = tl.load(totals + b)
    records += tl.load(begins + b, mask=total > 0, other=0)
    start = total * 0
    while start < total:
        i = start + tl.arange(0, CHUNK)
        record = tl.load(records + i, mask=i < total, other=0)
        tl.store(to + (record >> WIDTH), record.to(to.dtype.element_ty), mask=i < total)
        start += CHUNK
