"""The kernel that reads both copies of all weights: sizes of classes, and a record of every weight that changed.

Most cells have no change. So a block is looked at in two steps: a lane for each cell counts classes and finds which
weights differ; then a lane for each of these, which are few, makes a record. Between the steps the list of weights lies
where their records will be, and what the block has before a cell in `before`: other lanes read it after a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.kernels.delta.gpu.words import (
    at_least,
    cell_bytes,
    change_of,
    classes_of,
    count_classes,
    evens,
    exponents_of,
    field_of,
    half,
    length_of,
    mixed,
    one_of,
    popcount,
    shift_of,
    words_at,
)


@triton.jit(do_not_specialize=["room", "all_sizes"])
def compare(
    table, owner, choices, cursor, room, records, before, begins, emitted, counts, all_sizes, totals,
    WORDS: tl.constexpr, CHUNK: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """One block: how many weights of each class it has and how many of these changed, a record (rank in class and
    block, class, change) of every weight that changed and of the others of dense classes, in order, and what the
    changes add to the fingerprint.

    `cursor` says where the next block's records go, and at last how many there are: if these are more than `room`, some
    blocks have not written theirs, and nothing of this launch is good for anything.
    """
    CELLS: tl.constexpr = WORDS // 4
    b = tl.program_id(0)
    s = tl.load(owner + b)
    old, new = tl.load(table + s * 8), tl.load(table + s * 8 + 1)
    weights, first = tl.load(table + s * 8 + 2), tl.load(table + s * 8 + 4)
    begin = (b - first) * WORDS
    limits, dense = tl.load(choices + s * 4), tl.load(choices + s * 4 + 1)
    cell = tl.arange(0, CELLS)
    at = begin + cell * 4
    x_0, x_1 = words_at(old, at, weights, LANES), words_at(old, at + 1, weights, LANES)
    x_2, x_3 = words_at(old, at + 2, weights, LANES), words_at(old, at + 3, weights, LANES)
    y_0, y_1 = words_at(new, at, weights, LANES), words_at(new, at + 1, weights, LANES)
    y_2, y_3 = words_at(new, at + 2, weights, LANES), words_at(new, at + 3, weights, LANES)
    flags = _flags(x_0 ^ y_0, x_1 ^ y_1, x_2 ^ y_2, x_3 ^ y_3, WIDTH)
    if dense != 0:
        inside = tl.maximum(weights - at * LANES, 0).to(tl.int32)
        more = _dense(x_0, 0, limits, dense, CLASSES, WIDTH, LANES, MANTISSA, EXPONENTS)
        more |= _dense(x_1, 1, limits, dense, CLASSES, WIDTH, LANES, MANTISSA, EXPONENTS)
        more |= _dense(x_2, 2, limits, dense, CLASSES, WIDTH, LANES, MANTISSA, EXPONENTS)
        more |= _dense(x_3, 3, limits, dense, CLASSES, WIDTH, LANES, MANTISSA, EXPONENTS)
        flags |= more & ((1 << tl.minimum(inside, 4 * LANES)) - 1)
    last = tl.load(choices + s * 4 + 2).to(tl.int32)
    e_0, e_1, e_2, e_3 = cell_bytes(x_0, x_1, x_2, x_3, WIDTH, MANTISSA, EXPONENTS)
    count = count_classes(e_0, e_1, e_2, e_3, limits, last, LANES)
    even, odd = evens(count), evens(count >> 8)
    out, number = _listed(
        flags, cell, tl.cumsum(even, 0) - even, tl.cumsum(odd, 0) - odd, cursor, room, records, before
    )
    tl.store(begins + b, out)
    tl.store(emitted + b, number)
    c = tl.arange(0, CLASSES)
    to = counts + 1 + first * CLASSES + c * tl.load(table + s * 8 + 5) + (b - first)
    if b == 0:
        tl.store(counts, 0)
    # Words behind the end are loaded as 0, of class 0 and behind all others: only their number must be subtracted.
    beyond = tl.maximum((begin + WORDS) * LANES - weights, 0).to(tl.int32)
    shift = (c * 8).to(tl.int64)
    tl.store(to, field_of(tl.sum(even), tl.sum(odd), shift) - tl.where(c == 0, beyond, 0))
    tl.debug_barrier()
    changed, gained = _recorded(
        old, new, begin, tl.load(table + s * 8 + 3), weights, limits, records + out, before + 2 * out, number, CHUNK,
        CLASSES, WIDTH, LANES, MANTISSA, EXPONENTS,
    )  # fmt: skip
    # In each lane at most as many as a byte holds, but not in all: the bytes become fields of 16 bits before the sum.
    tl.store(to + all_sizes, field_of(tl.sum(evens(changed)), tl.sum(evens(changed >> 8)), shift))
    tl.atomic_add(totals + s * 8 + 1, tl.sum(gained), sem="relaxed")


@triton.jit
def _flags(d_0, d_1, d_2, d_3, WIDTH: tl.constexpr):
    """Which weights of cells differ, a bit of each in their order, given what differs in the four words."""
    found = tl.zeros_like(d_0).to(tl.int32)
    for h in tl.static_range(8):
        d = half(d_0 if h < 2 else (d_1 if h < 4 else (d_2 if h < 6 else d_3)), h % 2)
        if WIDTH == 16:
            # Bits 15 and 31 where any bit of their 16 is set; bits h and 16 + h of what is found.
            some = ((d & 0x7FFF7FFF) + 0x7FFF7FFF) | d
            found |= (some >> (15 - h)) & (0x10001 << h)
        else:
            found |= (d != 0).to(tl.int32) << h
    if WIDTH == 16:
        # Even weights are in the low half, odd ones in the high half: spread both, then put them between each other.
        found = (found | (found << 4)) & 0x0F0F0F0F
        found = (found | (found << 2)) & 0x33333333
        found = (found | (found << 1)) & 0x55555555
        found = (found | (found >> 15)) & 0xFFFF
    return found


@triton.jit
def _dense(
    x, q: tl.constexpr, limits, dense, CLASSES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Which weights of cells are of dense classes, a bit of each, given their words q."""
    found = tl.zeros_like(x).to(tl.int32)
    for j in tl.static_range(2):
        classes = classes_of(exponents_of(half(x, j), WIDTH, MANTISSA, EXPONENTS), limits, limits, WIDTH, CLASSES)
        for k in tl.static_range(LANES // 2):
            of_dense = ((dense >> shift_of(classes, k)) & 1).to(tl.int32)
            found |= of_dense << (q * LANES + j * (LANES // 2) + k)
    return found


@triton.jit
def _listed(flags, cell, even_before, odd_before, cursor, room, records, before):
    """List the flagged weights of a block at the place of their records: for each its bit in the cell, the cell, and
    the place in `before` of the counts before that cell. Return the beginning and the length of the list."""
    many, want = popcount(flags), (flags != 0).to(tl.int32)
    both = many | (want << 16)
    sums = tl.cumsum(both, 0) - both
    number = tl.sum(both) & 0xFFFF
    out = tl.atomic_add(cursor, number.to(tl.int64), sem="relaxed")
    fits = out + number <= room
    number = tl.where(fits, number, 0)
    place = sums >> 16
    # There are no more cells than records: one room serves both.
    tl.store(before + 2 * (out + place), even_before, mask=(want != 0) & fits)
    tl.store(before + 2 * (out + place) + 1, odd_before, mask=(want != 0) & fits)
    to = records + out + (sums & 0xFFFF)
    head = (place << 24) | (cell << 16)
    left, rounds = flags, tl.where(fits, tl.max(many), 0)
    while rounds > 0:
        tl.store(to, head | (left & -left), mask=left != 0)
        left &= left - 1
        to += 1
        rounds -= 1
    return out, number


@triton.jit
def _recorded(
    old, new, begin, first_word, weights, limits, records, before, number, CHUNK: tl.constexpr, CLASSES: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Make records of what `_listed` has left. What lanes counted of changes, a byte for each class, and what these add
    to the fingerprint. A lane sees at most WORDS * LANES / CHUNK weights of a block, which must be less than 256."""
    changed, gained = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
    start = number * 0
    while start < number:
        i = start + tl.arange(0, CHUNK)
        valid = i < number
        item = tl.load(records + i, mask=valid, other=1).to(tl.int32)
        place = (item >> 24) & 0xFF
        at, bit = begin + ((item >> 16) & 0xFF) * 4, length_of(item & 0xFFFF, 16)
        x_0, x_1 = words_at(old, at, weights, LANES), words_at(old, at + 1, weights, LANES)
        x_2, x_3 = words_at(old, at + 2, weights, LANES), words_at(old, at + 3, weights, LANES)
        q, shift = bit // LANES, ((bit % LANES) * WIDTH).to(tl.int64)
        x = tl.where(q < 2, tl.where(q == 0, x_0, x_1), tl.where(q == 2, x_2, x_3))
        y = words_at(new, at + q, weights, LANES)
        u, v = _bits(x >> shift, WIDTH), _bits(y >> shift, WIDTH)
        differs = valid & (u != v)
        exponent = ((u >> MANTISSA) & (EXPONENTS - 1)).to(tl.int32)
        of_class = shift_of(classes_of(exponent, limits, limits, 32, CLASSES), 0)
        rank = field_of(
            tl.load(before + 2 * place, mask=valid, other=0), tl.load(before + 2 * place + 1, mask=valid, other=0),
            of_class,
        )  # fmt: skip
        e_0, e_1, e_2, e_3 = cell_bytes(x_0, x_1, x_2, x_3, WIDTH, MANTISSA, EXPONENTS)
        rank += _rank(e_0, e_1, e_2, e_3, bit, of_class, limits, WIDTH)
        record = rank | (of_class << 9).to(tl.int32) | (change_of(u, v, WIDTH) << WIDTH)
        tl.store(records + i, record, mask=valid)
        changed += tl.where(differs, one_of(of_class, 0, CLASSES), 0)
        # A word adds once, by the first of its weights that differs.
        lower = (tl.full([1], 1, tl.int64) << shift) - 1
        adds = differs & (((x ^ y) & lower) == 0)
        gained += mixed(y, first_word + at + q, adds) - mixed(x, first_word + at + q, adds)
        start += CHUNK
    return changed, gained


@triton.jit
def _bits(words, WIDTH: tl.constexpr):
    """The lowest weight of words, as `words.lane` has it."""
    if WIDTH == 16:
        bits = words.to(tl.int32) & 0xFFFF
    else:
        bits = words & 0xFFFFFFFF
    return bits


@triton.jit
def _rank(e_0, e_1, e_2, e_3, bit, of_class, limits, WIDTH: tl.constexpr):
    """How many weights of cells come before number `bit` of the cell and are of the same class, 8 times whose number is
    given. A pack has the exponents of four weights: those of 16 bits in the order 0, 2, 1, 3."""
    start = _start(limits, of_class)
    start = tl.where(of_class == 0, 0, start)
    # The limit of the class after the last is 0, as that of class 0: it begins at 256, beyond all.
    beyond = _start(limits, (of_class + 8) & 63)
    pack, here = bit >> 2, bit & 3
    THIRD: tl.constexpr = 0x00010001 if WIDTH == 16 else 0x00000101
    mask = tl.where(here < 2, here, tl.where(here == 2, THIRD, 0x00010101))
    found = tl.zeros_like(bit)
    for p in tl.static_range(64 // WIDTH):
        e = e_0 if p == 0 else (e_1 if p == 1 else (e_2 if p == 2 else e_3))
        same = _reach(e, start) - _reach(e, beyond)
        found += tl.where(pack > p, same, tl.where(pack == p, same & mask, 0))
    return (found * 0x01010101) >> 24


@triton.jit
def _start(limits, of_class):
    """The exponent that classes begin at, 8 times whose numbers are given; 256 where the limit is 0."""
    return (256 - ((limits >> of_class) & 0xFF)).to(tl.int32)


@triton.jit
def _reach(exponents, start):
    """A 1 in each byte that is at least `start`, which may be 256: see `words.at_least`."""
    carry = tl.where(start > 255, 0, (0x80 - (start & 0x7F)) * 0x01010101)
    return at_least(exponents, carry, tl.where(start < 128, -1, 0))
