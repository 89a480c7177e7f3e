"""Kernels that read deltas.

Where changed weights are coded, their events give their ranks in order. Every other subset becomes a bitmap over its
items, with prefix sums of its ones: whether an item is a member and how many members come before it can then be asked
for any item, at any time, by any program. From its rank a weight is found through the numbers of its class before each
block and before each cell of a block.

The columns of a group are those of `streams`, the table of segments and the places of blocks those of `compare`.
Whatever the bytes are, nothing outside of the arrays is read or written: indices that cannot be are masked and set
`fault`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.weights.delta.gpu.words import (
    changed_bits,
    classes_of,
    evens,
    exponents_of,
    field_of,
    half,
    lane,
    mixed,
    one_of,
    popcount,
    shift_of,
    words_at,
)


@triton.jit
def sizes(
    table, owner, limits, before, out, sums, WORDS: tl.constexpr, CLASSES: tl.constexpr, SUM: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """How many weights of each class a block has, and how many come before each of its cells: CLASSES / 4 numbers, each
    of four classes. With SUM, also the block's part of the fingerprint."""
    CELLS: tl.constexpr = WORDS // 4
    PARTS: tl.constexpr = CLASSES // 4
    b = tl.program_id(0)
    s = tl.load(owner + b)
    weights, first = tl.load(table + s * 8 + 2), tl.load(table + s * 8 + 4)
    low, high = tl.load(limits + s * 3), tl.load(limits + s * 3 + 1)
    cell = tl.arange(0, CELLS)
    at = (b - first) * WORDS + cell * 4
    count_0, count_1, sum = tl.zeros([CELLS], tl.int64), tl.zeros([CELLS], tl.int64), tl.zeros([CELLS], tl.int64)
    for q in tl.static_range(4):
        x = words_at(tl.load(table + s * 8), at + q, weights, LANES)
        if SUM:
            sum += mixed(x, tl.load(table + s * 8 + 3) + at + q, (at + q) * LANES < weights)
        for j in tl.static_range(2):
            classes = classes_of(exponents_of(half(x, j), WIDTH, MANTISSA, EXPONENTS), low, high, WIDTH, CLASSES)
            for k in tl.static_range(LANES // 2):
                count_0 += one_of(shift_of(classes, k), 0, CLASSES)
                if CLASSES > 8:
                    count_1 += one_of(shift_of(classes, k), 1, CLASSES)
    if SUM:
        tl.atomic_add(sums + s * 2, tl.sum(sum), sem="relaxed")
    mine = before + (b.to(tl.int64) * CELLS + cell) * PARTS
    even, odd = evens(count_0), evens(count_0 >> 8)
    tl.store(mine, tl.cumsum(even, 0) - even)
    tl.store(mine + 1, tl.cumsum(odd, 0) - odd)
    c = tl.arange(0, CLASSES)
    shift = (c * 8).to(tl.int64)
    found = field_of(tl.sum(even), tl.sum(odd), shift)
    if CLASSES > 8:
        even, odd = evens(count_1), evens(count_1 >> 8)
        tl.store(mine + 2, tl.cumsum(even, 0) - even)
        tl.store(mine + 3, tl.cumsum(odd, 0) - odd)
        found = tl.where(c < 8, found, field_of(tl.sum(even), tl.sum(odd), shift))
    # What is loaded behind the end is 0, of class 0 and behind all others: only its number is to be taken off.
    beyond = tl.maximum(((b - first) * WORDS + WORDS) * LANES - weights, 0).to(tl.int32)
    tl.store(out + first * CLASSES + c * tl.load(table + s * 8 + 5) + (b - first), found - tl.where(c == 0, beyond, 0))


@triton.jit
def _unary_words(data, unary, owner, chunks_from, CHUNK: tl.constexpr):
    """A chunk of words of a segment's unary stream, all other bits 0, and each word's first bit in the stream."""
    p = tl.program_id(0)
    s = tl.load(owner + p)
    begin, end = tl.load(unary + s * 4), tl.load(unary + s * 4 + 1)
    word = (begin >> 5) + (p - tl.load(chunks_from + s)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    bit = word * 32
    words = tl.load(data + word, mask=bit < end, other=0)
    low = tl.maximum(begin - bit, 0)
    high = tl.minimum(tl.maximum(end - bit, 0), 32)
    keep = ((tl.full([1], 1, tl.int64) << high) - (tl.full([1], 1, tl.int64) << tl.minimum(low, high))).to(tl.int32)
    return s, words & keep, bit - begin


@triton.jit
def count_ones(data, unary, owner, chunks_from, counts, CHUNK: tl.constexpr):
    _, words, _ = _unary_words(data, unary, owner, chunks_from, CHUNK)
    tl.store(counts + tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), popcount(words))


@triton.jit
def find_ones(data, unary, owner, chunks_from, counts, places, CHUNK: tl.constexpr):
    """Where each one-bit is in its stream: the ends of the events, in order. `counts` are prefix sums now."""
    s, words, bit = _unary_words(data, unary, owner, chunks_from, CHUNK)
    first, end = tl.load(unary + s * 4 + 2), tl.load(unary + s * 4 + 3)
    before = tl.load(counts + tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)) - tl.load(
        counts + tl.load(chunks_from + s) * CHUNK
    )
    k = tl.arange(0, 32)[None, :]
    ones = words[:, None]
    event = first + before[:, None] + popcount(ones & ((tl.full([1, 1], 1, tl.int32) << k) - 1))
    mask = (((ones >> k) & 1) != 0) & (event < end)
    tl.store(places + event, (bit[:, None] + k).to(tl.int32), mask=mask)


@triton.jit
def _bits_at(data, at, width, valid):
    """`width` (at most 31) bits from bit `at` on. The data have a word more than they need."""
    word = at >> 5
    low = tl.load(data + word, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(data + word + 1, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF
    window = (high << 32) | low
    return ((window >> (at & 31)) & ((tl.full([1], 1, tl.int64) << width) - 1)).to(tl.int32)


@triton.jit
def _events(owner, chunks_from, events_from, CHUNK: tl.constexpr):
    """A chunk of events of one coded subset: the subset, their order in it, and which are there."""
    p = tl.program_id(0)
    subset = tl.load(owner + p)
    order = (p - tl.load(chunks_from + subset)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    first = tl.load(events_from + subset)
    return subset, first, order, order < tl.load(events_from + subset + 1) - first


@triton.jit
def gaps(
    data, owner, chunks_from, events_from, fields_from, kinds, unary, places, steps, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """How far each event's item is from the one before. COLUMNS are those of a segment."""
    subset, first, order, valid = _events(owner, chunks_from, events_from, CHUNK)
    event = first + order
    begins = event == tl.load(unary + (subset // COLUMNS) * 4 + 2)
    place = tl.load(places + event, mask=valid, other=0)
    before = tl.load(places + event - 1, mask=valid & ~begins, other=-1)
    rice = (tl.load(kinds + subset) & 127).to(tl.int64)
    low = _bits_at(data, tl.load(fields_from + subset) + order * rice, rice, valid & (rice > 0))
    gap = ((place - before - 1).to(tl.int64) << rice) | low.to(tl.int64)
    # No segment has more items than 2**22: a gap beyond is damage, and must stay so in the sums.
    tl.store(steps + event, tl.minimum(tl.maximum(gap, 0), 1 << 23).to(tl.int32) + 1, mask=valid)


@triton.jit
def mark(
    owner, chunks_from, events_from, total, kinds, words_from, changes_from, steps, bitmap, ranks, fault,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rank of each changed weight where the changed ones are coded; of all other subsets, the bit of each event's
    item. `steps` are prefix sums now, the first one 0. COLUMNS are those of a group."""
    subset, first, order, valid = _events(owner, chunks_from, events_from, CHUNK)
    item = tl.load(steps + first + order + 1, mask=valid, other=1) - tl.load(steps + first) - 1
    wrong = valid & ((item < 0) | (item >= tl.load(total + subset)))
    tl.store(fault + item * 0, 1, mask=wrong)
    direct = (subset % COLUMNS == 0) & ((tl.load(kinds + subset) & 128) == 0)
    to = tl.load(changes_from + subset // COLUMNS) + order
    tl.store(ranks + to, item.to(tl.int32), mask=valid & ~wrong & direct)
    bit = (tl.full([1], 1, tl.int64) << (item & 31)).to(tl.int32)
    mask = valid & ~wrong & ~direct
    tl.atomic_or(bitmap + tl.load(words_from + subset) + (item >> 5), bit, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def count_bits(bitmap, counts, number, CHUNK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(counts + i, popcount(tl.load(bitmap + i, mask=i < number, other=0)), mask=i < number)


@triton.jit
def _ones_before(bitmap, ranks, first, item, valid):
    """The bitmap's word of each item, and how many ones of the subset that begins at word `first` come before it."""
    word = first + (item >> 5)
    bits = tl.load(bitmap + word, mask=valid, other=0)
    below = ((tl.full([1], 1, tl.int64) << (item & 31).to(tl.int64)) - 1).to(tl.int32)
    before = tl.load(ranks + word, mask=valid, other=0) - tl.load(ranks + first + item * 0, mask=valid, other=0)
    return bits, before + popcount(bits & below)


@triton.jit
def changes(
    data, owner, chunks_from, changes_from, kinds, total, words_from, fields_from, bitmap, ranks, out,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The changes of a chunk: each follows the subsets of lengths down to its own."""
    p = tl.program_id(0)
    g = tl.load(owner + p)
    start = tl.load(changes_from + g)
    index = (p - tl.load(chunks_from + g)) * CHUNK + tl.arange(0, CHUNK)
    valid = index < tl.load(changes_from + g + 1) - start
    columns = g * (2 * WIDTH)
    bits, _ = _ones_before(bitmap, ranks, tl.load(words_from + columns + 1), index, valid)
    negative = (((bits >> (index & 31)) & 1) != 0) != ((tl.load(kinds + columns + 1) & 128) != 0)
    item, active = index, valid
    length = tl.zeros([CHUNK], tl.int32)
    order = tl.zeros([CHUNK], tl.int32)
    level = g * 0
    while (level < WIDTH - 1) & (tl.max(active.to(tl.int32)) != 0):
        column = columns + 2 + level
        active = active & (item < tl.load(total + column))
        inverted = (tl.load(kinds + column) & 128) != 0
        bits, ones = _ones_before(bitmap, ranks, tl.load(words_from + column), item, active)
        member = (((bits >> (item & 31)) & 1) != 0) != inverted
        members = tl.where(inverted, item - ones, ones)
        order = tl.where(active, tl.where(member, members, item - members), order)
        active = active & member
        item = tl.where(active, members, item)
        level += 1
        length = tl.where(active, level, length)
    column = columns + WIDTH + length
    here = valid & (length > 0) & (order < tl.load(total + column, mask=valid, other=0))
    at = tl.load(fields_from + column, mask=here, other=0) + order.to(tl.int64) * length
    size = _bits_at(data, at, length.to(tl.int64), here).to(tl.int64) + (
        tl.full([1], 1, tl.int64) << length.to(tl.int64)
    )
    tl.store(out + start + index, tl.where(negative, -size, size).to(tl.int32), mask=valid)


@triton.jit
def members(
    owner, chunks_from, total, words_from, changes_from, bitmap, before, ranks, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The ranks of the changed weights of groups whose other ones are marked: a chunk is of words of their bitmap."""
    p = tl.program_id(0)
    g = tl.load(owner + p)
    items, first = tl.load(total + g * COLUMNS), tl.load(words_from + g * COLUMNS)
    word = (p - tl.load(chunks_from + g)) * CHUNK + tl.arange(0, CHUNK)
    valid = word * 32 < items
    others = tl.load(bitmap + first + word, mask=valid, other=0)
    ones = tl.load(before + first + word, mask=valid, other=0) - tl.load(before + first)
    k = tl.arange(0, 32)[None, :]
    item = word[:, None] * 32 + k
    below = others[:, None] & ((tl.full([1, 1], 1, tl.int32) << k) - 1)
    start = tl.load(changes_from + g)
    order = item - ones[:, None] - popcount(below)
    mask = valid[:, None] & (item < items) & (((others[:, None] >> k) & 1) == 0)
    tl.store(ranks + start + order, item, mask=mask & (order < tl.load(changes_from + g + 1) - start))


@triton.jit
def locate(
    table, owner, chunks_from, changes_from, limits, sizes, before, ranks, changes, flags, places, values,
    CHUNK: tl.constexpr, WORDS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Place and new value of each change of a chunk. The place counts weights over all blocks of the batch.

    The block is found by how many of the class come before each, the cell likewise, the weight by counting.
    """
    CELLS: tl.constexpr = WORDS // 4
    PARTS: tl.constexpr = CLASSES // 4
    p = tl.program_id(0)
    g = tl.load(owner + p)
    s, c = g // CLASSES, g % CLASSES
    start = tl.load(changes_from + g)
    index = (p - tl.load(chunks_from + g)) * CHUNK + tl.arange(0, CHUNK)
    valid = index < tl.load(changes_from + g + 1) - start
    rank = tl.load(ranks + start + index, mask=valid, other=0)
    first, blocks = tl.load(table + s * 8 + 4).to(tl.int32), tl.load(table + s * 8 + 5).to(tl.int32)
    mine = sizes + first * CLASSES + c * blocks
    rank += tl.load(mine)
    b = tl.zeros([CHUNK], tl.int32)
    for step in tl.static_range(12):
        next = b + (2048 >> step)
        within = next < blocks
        b = tl.where(within & (tl.load(mine + next, mask=valid & within, other=0) <= rank), next, b)
    rank -= tl.load(mine + b, mask=valid, other=0)
    row = before + ((first + b).to(tl.int64) * CELLS) * PARTS + (c >> 3) * 2 + (c & 1)
    shift = ((c & 7) >> 1).to(tl.int64) * 16
    cell, passed = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    step = CELLS // 2
    while step > 0:
        next = cell + step
        here = ((tl.load(row + next * PARTS, mask=valid, other=0) >> shift) & 0xFFFF).to(tl.int32)
        cell = tl.where(here <= rank, next, cell)
        passed = tl.where(here <= rank, here, passed)
        step = step // 2
    rank -= passed
    PAIR: tl.constexpr = 0x10001 if WIDTH == 16 else 1
    at_least = _limit(limits, s, c, CLASSES)
    below = _limit(limits, s, c + 1, CLASSES)
    weights = tl.load(table + s * 8 + 2)
    lane_found = tl.zeros([CHUNK], tl.int32)
    bits = tl.zeros([CHUNK], tl.int32) if WIDTH == 16 else tl.zeros([CHUNK], tl.int64)
    for q in tl.static_range(4):
        x = words_at(tl.load(table + s * 8), b * WORDS + cell * 4 + q, weights, LANES)
        for j in tl.static_range(2):
            exponents = exponents_of(half(x, j), WIDTH, MANTISSA, EXPONENTS)
            inside = (exponents + at_least * PAIR) & ~(exponents + below * PAIR)
            for k in tl.static_range(LANES // 2):
                is_one = (inside >> (8 + 16 * k)) & 1
                hit = (is_one != 0) & (rank == 0)
                rank -= is_one
                lane_found = tl.where(hit, q * LANES + j * (LANES // 2) + k, lane_found)
                bits = tl.where(hit, lane(half(x, j), k, WIDTH), bits)
    change = tl.load(changes + start + index, mask=valid, other=0)
    new = changed_bits(bits, change.to(bits.dtype), WIDTH)
    in_all = (first + b) * CELLS + cell
    tl.atomic_or(flags + in_all, tl.full([1], 1, tl.int32) << lane_found, mask=valid, sem="relaxed")
    tl.store(places + start + index, in_all * (4 * LANES) + lane_found, mask=valid)
    tl.store(values + start + index, new.to(values.dtype.element_ty), mask=valid)


@triton.jit
def _limit(limits, s, c, CLASSES: tl.constexpr):
    """256 less the start of class c; of the one behind the last, 0."""
    packed = tl.load(limits + s * 3 + tl.where(c < 8, 0, 1))
    found = ((packed >> ((c & 7) * 8).to(tl.int64)) & 0xFF).to(tl.int32)
    return tl.where(c == 0, 256, tl.where(c < CLASSES, found, 0))


@triton.jit(do_not_specialize=["number"])
def deliver(
    places, values, flags, cells_from, out_places, out_values, number, CHUNK: tl.constexpr, LANES: tl.constexpr
):
    """The changes in the order of their places."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    valid = i < number
    place = tl.load(places + i, mask=valid, other=0)
    cell = place // (4 * LANES)
    below = (tl.full([1], 1, tl.int32) << (place % (4 * LANES))) - 1
    to = tl.load(cells_from + cell, mask=valid, other=0)
    to += popcount(tl.load(flags + cell, mask=valid, other=0) & below)
    # Fewer flags than changes are a fault, seen elsewhere: no place is beyond `number` then either.
    tl.store(out_places + to, place, mask=valid)
    tl.store(out_values + to, tl.load(values + i, mask=valid, other=0), mask=valid)


@triton.jit
def gain(
    table, owner, cells_from, places, values, sums, WORDS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """What a block's changes add to the fingerprint: the first change of each word looks after all of them."""
    CELLS: tl.constexpr = WORDS // 4
    b = tl.program_id(0)
    s = tl.load(owner + b)
    start, end = tl.load(cells_from + b * CELLS), tl.load(cells_from + (b + 1) * CELLS)
    gained = tl.zeros([CHUNK], tl.int64)
    weights, first = tl.load(table + s * 8 + 2), tl.load(table + s * 8 + 4).to(tl.int32)
    i = start + tl.arange(0, CHUNK)
    while start < end:
        valid = i < end
        place = tl.load(places + i, mask=valid, other=0)
        word = place // LANES
        leads = valid & (
            (i == tl.load(cells_from + b * CELLS))
            | (tl.load(places + i - 1, mask=valid & (i > 0), other=-1) // LANES != word)
        )
        at = tl.where(valid, word - first * WORDS, 0)
        x = words_at(tl.load(table + s * 8), at, weights, LANES)
        y = x
        for k in tl.static_range(LANES):
            mine = i + k < end
            other = tl.load(places + i + k, mask=mine, other=-1)
            value = tl.load(values + i + k, mask=mine, other=0).to(tl.int64) & ((1 << WIDTH) - 1)
            shift = (other % LANES).to(tl.int64) * WIDTH
            changed = (y & ~(tl.full([1], (1 << WIDTH) - 1, tl.int64) << (shift & 63))) | (value << (shift & 63))
            y = tl.where(mine & (other // LANES == word), changed, y)
        there = tl.load(table + s * 8 + 3) + at
        gained += mixed(y, there, leads) - mixed(x, there, leads)
        i += CHUNK
        start += CHUNK
    tl.atomic_add(sums + s * 2 + 1, tl.sum(gained), sem="relaxed")


@triton.jit
def scatter(table, owner, cells_from, places, values, WORDS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Write a block's new values where they belong."""
    CELLS: tl.constexpr = WORDS // 4
    b = tl.program_id(0)
    s = tl.load(owner + b)
    to = tl.load(table + s * 8).to(tl.pointer_type(values.dtype.element_ty))
    to -= tl.load(table + s * 8 + 4) * (WORDS * LANES)
    start, end = tl.load(cells_from + b * CELLS), tl.load(cells_from + (b + 1) * CELLS)
    while start < end:
        i = start + tl.arange(0, CHUNK)
        place = tl.load(places + i, mask=i < end, other=0)
        tl.store(to + place, tl.load(values + i, mask=i < end, other=0), mask=i < end)
        start += CHUNK
