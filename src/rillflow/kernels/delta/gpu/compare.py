"""Kernels around the comparison of weights (see `records`): what classes to make, and in what order changes are coded.

The table of segments has a row of eight 64-bit numbers for each: address of the old words, of the new ones, weights,
index of its first word in its tensor, first block, blocks, the block after its last. A block is WORDS words; it belongs
to one segment. What is counted per block and class lies at `first block * CLASSES + class * blocks + block`, so that
one prefix sum over all orders everything by segment, class and position. A group is a class of a segment. Sizes come
first, then changes, after a 0: prefix sums that are made in place then begin with it. Totals are those of `places`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.kernels.delta.gpu.words import (
    change_of,
    evens,
    exponents_of,
    field_of,
    half,
    length_of,
    mixed,
    weights_at,
    words_at,
)

# Exponents that the choice of classes looks at, from the highest one seen downwards, and what it tells apart in each:
# no change, or the length of the change.
BINS = tl.constexpr(32)
SYMBOLS = tl.constexpr(32)
# A class must save more than this: an estimate of its part of the table, and a share of all bits.
CLASS_BITS = tl.constexpr(300.0)
CLASS_SHARE = tl.constexpr(0.004)
FAR = tl.constexpr(1e30)


@triton.jit
def sample(
    table, histogram, lowest, WORDS: tl.constexpr, RUNS: tl.constexpr, SHARES: tl.constexpr, ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Histograms of exponent and change over evenly spread runs of words: all of a small segment, a part of a large.

    Clearing and reading its bins is what a histogram takes most of its time for, so RUNS runs go into one.
    """
    s = tl.program_id(0)
    old, new = tl.load(table + s * 8), tl.load(table + s * 8 + 1)
    weights = tl.load(table + s * 8 + 2)
    count = (weights + LANES - 1) // LANES
    offsets = tl.arange(0, WORDS)
    middle = count // 2 + offsets
    anchor = words_at(old, middle, weights, LANES)
    top = 0
    for j in tl.static_range(2):
        both = exponents_of(half(anchor, j), WIDTH, MANTISSA, EXPONENTS)
        for k in tl.static_range(LANES // 2):
            top = tl.maximum(top, tl.max((both >> (16 * k)) & 0xFF))
    low = tl.maximum(top - (BINS - 1), 0)
    tl.store(lowest + s, low)
    found = tl.zeros([BINS * SYMBOLS], tl.int32)
    item = tl.arange(0, RUNS * WORDS * LANES)
    words, run = count.to(tl.int32), item // (WORDS * LANES)
    for step in range(ROUNDS):
        share = (tl.program_id(1) * ROUNDS + step) * RUNS + run
        start, end = words * share // SHARES, words * (share + 1) // SHARES
        at = start + (item // LANES) % WORDS
        place = at * LANES + item % LANES
        inside = (at < end) & (place < weights)
        u, v = weights_at(old, place, inside, WIDTH), weights_at(new, place, inside, WIDTH)
        bin = tl.minimum(tl.maximum(((u >> MANTISSA) & (EXPONENTS - 1)).to(tl.int32) - low, 0), BINS - 1)
        size = tl.abs(change_of(u, v, WIDTH))
        symbol = tl.where(u == v, 0, tl.minimum(length_of(size, WIDTH) + 1, SYMBOLS - 2))
        # The last symbol is of no weight: `choose` leaves it out.
        found += tl.histogram(tl.where(inside, bin * SYMBOLS + symbol, SYMBOLS - 1), BINS * SYMBOLS)
    at = tl.arange(0, BINS * SYMBOLS)
    tl.atomic_add(histogram + s * (BINS * SYMBOLS) + at, found, mask=found != 0, sem="relaxed")


@triton.jit
def plogp(counts):
    return tl.where(counts > 0, counts * tl.log2(tl.maximum(counts, 1e-9)), 0.0)


@triton.jit
def choose(table, histogram, lowest, before, choices, CLASSES: tl.constexpr):
    """The cheapest partition of the exponents into at most CLASSES ranges, by the estimated size of the code.

    `choices` gets of each segment: the limits (see `reached`), a byte of ones for each class of which more than half
    changed, the last class, the estimated number of records (see `records`). `before` is scratch.
    """
    s = tl.program_id(0)
    i, j = tl.arange(0, BINS), tl.arange(0, BINS)
    rows = histogram + s * (BINS * SYMBOLS) + i * SYMBOLS
    size = tl.zeros([BINS, BINS], tl.float32)
    changed = tl.zeros([BINS, BINS], tl.float32)
    bits = tl.zeros([BINS, BINS], tl.float32)
    for symbol in range(SYMBOLS - 1):
        column = tl.load(rows + symbol).to(tl.float32)
        sums = tl.cumsum(column, 0)
        # In the classes of the bins from i to j, both included.
        inside = tl.maximum(sums[None, :] - (sums - column)[:, None], 0.0)
        size += inside
        if symbol > 0:
            changed += inside
            bits -= plogp(inside)
    bits += plogp(size) - plogp(size - changed)
    seen = tl.sum(tl.where((i[:, None] == 0) & (j[None, :] == BINS - 1), size, 0.0))
    whole = tl.sum(tl.where((i[:, None] == 0) & (j[None, :] == BINS - 1), bits, 0.0))
    weights = tl.load(table + s * 8 + 2).to(tl.float32)
    bits += CLASS_BITS * seen / tl.maximum(weights, 1.0) + CLASS_SHARE * whole
    cost = tl.where(i[:, None] <= j[None, :], bits, FAR)
    scratch = before + s * (CLASSES * BINS)
    best = tl.where(i == 0, 0.0, FAR)  # of everything below bin i, by the classes so far
    cheapest, used = FAR, 1
    for c in range(CLASSES):
        totals = best[:, None] + cost
        reached = tl.min(totals, 0)
        tl.store(scratch + c * BINS + j, tl.argmin(totals, 0))
        total = tl.sum(tl.where(j == BINS - 1, reached, 0.0))
        used = tl.where(total < cheapest, c + 1, used)
        cheapest = tl.minimum(total, cheapest)
        best = tl.min(tl.where(i[:, None] == j[None, :] + 1, reached[None, :], FAR), 1)
    tl.debug_barrier()
    end, low = BINS - 1, tl.load(lowest + s)
    limits, dense = low.to(tl.int64) * 0, low.to(tl.int64) * 0
    c, recorded = used - 1, 0.0
    while c >= 0:
        start = tl.load(scratch + c * BINS + end)
        mine = (i[:, None] == start) & (j[None, :] == end)
        some, all = tl.sum(tl.where(mine, changed, 0.0)), tl.sum(tl.where(mine, size, 0.0))
        is_dense = 2 * some > all
        recorded += tl.where(is_dense, all, some)
        dense |= (is_dense.to(tl.int64) * 0xFF) << (8 * c).to(tl.int64)
        limits |= tl.where(c == 0, 0, 256 - low - start).to(tl.int64) << (8 * c).to(tl.int64)
        end = start - 1
        c -= 1
    tl.store(choices + s * 4, limits)
    tl.store(choices + s * 4 + 1, dense)
    tl.store(choices + s * 4 + 2, (used - 1).to(tl.int64))
    tl.store(choices + s * 4 + 3, (recorded / tl.maximum(seen, 1.0) * weights).to(tl.int64))


@triton.jit(do_not_specialize=["words", "number", "first_word"])
def fingerprint(words, number, first_word, out, WORDS: tl.constexpr, ROUNDS: tl.constexpr):
    """Add a run of words to the fingerprint of the tensor at the address `words`."""
    start = tl.program_id(0).to(tl.int64) * (WORDS * ROUNDS)
    address = words.to(tl.int64)
    sums = tl.zeros([WORDS], tl.int64)
    for step in tl.static_range(ROUNDS):
        at = start + step * WORDS + tl.arange(0, WORDS)
        sums += mixed(words_at(address, at, number, 1), first_word + at, at < number)
    tl.atomic_add(out, tl.sum(sums), sem="relaxed")


@triton.jit
def total(table, owner, totals, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Add a block's part to the fingerprint of the old weights."""
    b = tl.program_id(0)
    s = tl.load(owner + b)
    weights = tl.load(table + s * 8 + 2)
    at = (b - tl.load(table + s * 8 + 4)) * WORDS + tl.arange(0, WORDS)
    x = words_at(tl.load(table + s * 8), at, weights, LANES)
    gained = tl.sum(mixed(x, tl.load(table + s * 8 + 3) + at, at * LANES < weights))
    tl.atomic_add(totals + s * 8, gained, sem="relaxed")


@triton.jit(do_not_specialize=["all_sizes"])
def sort(
    table, owner, records, begins, emitted, sums, all_sizes, modes, events_from, out_changes, events,
    CLASSES: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Changes in the order of groups, and an event for each coded item of the subsets of changed weights.

    `sums` are prefix sums of sizes and then of changes. The mode of a group is 0 when nothing is coded, 1 when the
    changed weights are, 2 when the others are. An event is a subset's number, 2 * WIDTH for each group, and an index.
    """
    b = tl.program_id(0)
    s = tl.load(owner + b)
    first, blocks = tl.load(table + s * 8 + 4), tl.load(table + s * 8 + 5)
    count = tl.load(emitted + b)
    mine = records + tl.load(begins + b)
    done_0, done_1 = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
    start = count * 0
    changes = sums + all_sizes
    zero = tl.load(changes)
    while start < count:
        at = start + tl.arange(0, CHUNK)
        valid = at < count
        record = tl.load(mine + at, mask=valid, other=0)
        change = (record >> WIDTH).to(tl.int32)
        c = ((record >> 12) & 15).to(tl.int32)
        member = valid & (change != 0)
        one = tl.where(member, tl.full([1], 1, tl.int64) << (c * 8).to(tl.int64), 0)
        even, odd = evens(one), evens(one >> 8)
        even_before, odd_before = tl.cumsum(even, 0) - even + done_0, tl.cumsum(odd, 0) - odd + done_1
        order = field_of(even_before, odd_before, (c * 8).to(tl.int64))
        done_0 += tl.sum(even)
        done_1 += tl.sum(odd)
        group = first * CLASSES + c * blocks
        in_all = tl.load(changes + group + (b - first), mask=valid, other=0) + order
        order = in_all - tl.load(changes + group, mask=valid, other=0)
        rank = tl.load(sums + group + (b - first), mask=valid, other=0) - tl.load(sums + group, mask=valid, other=0)
        rank += (record & 0xFFF).to(tl.int32)
        tl.store(out_changes + in_all - zero, change, mask=member)
        number = s * CLASSES + c
        mode = tl.load(modes + number, mask=valid, other=0)
        coded = valid & tl.where(member, mode == 1, mode == 2)
        to = tl.load(events_from + number, mask=valid, other=0) + tl.where(mode == 2, rank - order, order)
        event = ((number * (2 * WIDTH)).to(tl.int64) << 32) | rank.to(tl.int64)
        tl.store(events + to, event, mask=coded)
        start += CHUNK
