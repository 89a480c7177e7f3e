"""Kernels that read the streams of deltas: the ranks of changed weights in their groups, and their changes.

Where changed weights are coded, their events give their ranks in order. Every other subset becomes a bitmap over its
items, with prefix sums of its ones: whether an item is a member and how many members come before it can then be asked
for any item, at any time, by any program.

The columns of a group are those of `streams`. Whatever the bytes are, nothing outside of the arrays is read or written:
indices that cannot be are masked and set `fault`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.weights.delta.gpu.words import popcount


@triton.jit
def _unary_words(data, unary, owner, chunks_from, CHUNK: tl.constexpr):
    """A chunk of words of a segment's unary stream, all other bits 0."""
    p = tl.program_id(0)
    s = tl.load(owner + p)
    begin, end = tl.load(unary + s * 4), tl.load(unary + s * 4 + 1)
    word = (begin >> 5) + (p - tl.load(chunks_from + s)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    bit = word * 32
    words = tl.load(data + word, mask=bit < end, other=0)
    low = tl.maximum(begin - bit, 0)
    high = tl.minimum(tl.maximum(end - bit, 0), 32)
    keep = ((tl.full([1], 1, tl.int64) << high) - (tl.full([1], 1, tl.int64) << tl.minimum(low, high))).to(tl.int32)
    return words & keep


@triton.jit
def count_ones(data, unary, owner, chunks_from, words, counts, CHUNK: tl.constexpr):
    """The words of the streams, and after a 0 how many one-bits each has."""
    found = _unary_words(data, unary, owner, chunks_from, CHUNK)
    p = tl.program_id(0)
    i = p * CHUNK + tl.arange(0, CHUNK)
    tl.store(words + i, found)
    tl.store(counts + 1 + i, popcount(found))
    tl.store(counts, 0, mask=p == 0)


@triton.jit
def find_ones(words, unary, owner, chunks_from, counts, places, CHUNK: tl.constexpr):
    """Where each one-bit is in its stream: the ends of the events, in order. `counts` are prefix sums now.

    A lane for each bit: what is of a word is only loaded here, since all lanes of the word do it."""
    p = tl.program_id(0)
    s = tl.load(owner + p)
    chunk = tl.load(chunks_from + s)
    end = tl.load(unary + s * 4 + 3).to(tl.int32)
    first = tl.load(unary + s * 4 + 2).to(tl.int32) - tl.load(counts + chunk * CHUNK)
    start = ((p - chunk) * (CHUNK * 32)) - (tl.load(unary + s * 4) & 31).to(tl.int32)
    bit, k = tl.arange(0, CHUNK * 32), tl.arange(0, CHUNK * 32) & 31
    word = p * CHUNK + (bit >> 5)
    ones = tl.load(words + word)
    event = first + tl.load(counts + word) + popcount(ones & ((tl.full([1], 1, tl.int32) << k) - 1))
    tl.store(places + event, start + bit, mask=(((ones >> k) & 1) != 0) & (event < end))


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
    order = (p - tl.load(chunks_from + subset)) * CHUNK + tl.arange(0, CHUNK)
    first = tl.load(events_from + subset)
    return subset, first, order, order < tl.load(events_from + subset + 1) - first


@triton.jit
def _low_bits(data, subset, order, valid, fields_from, rice):
    """The low bits of the gaps of a subset's events."""
    at = tl.load(fields_from + subset) + order.to(tl.int64) * rice
    return _bits_at(data, at, rice, valid & (rice > 0))


@triton.jit
def low_sums(data, owner, chunks_from, events_from, fields_from, kinds, out, CHUNK: tl.constexpr):
    """After a 0, the sums of the low bits of the gaps of each chunk of events."""
    subset, _, order, valid = _events(owner, chunks_from, events_from, CHUNK)
    rice = (tl.load(kinds + subset) & 127).to(tl.int64)
    low = _low_bits(data, subset, order, valid, fields_from, rice)
    p = tl.program_id(0)
    tl.store(out + 1 + p, tl.sum(low, 0))
    tl.store(out, 0, mask=p == 0)


@triton.jit
def mark(
    data, owner, chunks_from, events_from, fields_from, total, kinds, words_from, changes_from, unary, places, lows,
    bitmap, ranks, fault, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The rank of each changed weight where the changed ones are coded; of all other subsets, the bit of each event's
    item. COLUMNS are those of a group.

    An item is the sum of the gaps up to its own. The sum of their unary parts is what the place of its one-bit is
    beyond the subset's first bit, less the one-bits among them; `lows` are prefix sums of the other parts.
    """
    subset, first, order, valid = _events(owner, chunks_from, events_from, CHUNK)
    begins = first == tl.load(unary + (subset // (COLUMNS * CLASSES)) * 4 + 2)
    before = tl.load(places + first - 1, mask=begins == 0, other=-1)
    rice = (tl.load(kinds + subset) & 127).to(tl.int64)
    low = _low_bits(data, subset, order, valid, fields_from, rice)
    low = tl.cumsum(low, 0) + (tl.load(lows + tl.program_id(0)) - tl.load(lows + tl.load(chunks_from + subset)))
    place = tl.load(places + first + order, mask=valid, other=0)
    wide = ((place - before - order - 1).to(tl.int64) << rice) + (low + order).to(tl.int64)
    wrong = valid & ((wide < 0) | (wide >= tl.load(total + subset)))
    item = wide.to(tl.int32)
    tl.store(fault + item * 0, 1, mask=wrong)
    good = valid & (wrong == 0)
    if (subset % COLUMNS == 0) & ((tl.load(kinds + subset) & 128) == 0):
        tl.store(ranks + tl.load(changes_from + subset // COLUMNS) + order, item, mask=good)
    else:
        bit = tl.full([CHUNK], 1, tl.int32) << (item & 31)
        tl.atomic_or(bitmap + tl.load(words_from + subset) + (item >> 5), bit, mask=good, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def count_bits(bitmap, counts, number, CHUNK: tl.constexpr):
    """After a 0, how many one-bits each word has."""
    p = tl.program_id(0)
    i = p.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(counts + 1 + i, popcount(tl.load(bitmap + i, mask=i < number, other=0)), mask=i < number)
    tl.store(counts, 0, mask=p == 0)


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
    tl.store(out + start + index, tl.where(negative, -size, size).to(out.dtype.element_ty), mask=valid)


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


@triton.jit(do_not_specialize=["segments", "blocks"])
def seen(
    counts, places, unary, chunks_from, runs, out, segments, blocks, CHUNK: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """What the host compares with the tables: how many changes there are, how many one-bits come before each unary
    stream and before the end, and where the last one of each stream is (see `Plans.unary_fits`)."""
    p = tl.program_id(0)
    s = p * MANY + tl.arange(0, MANY)
    ones = tl.load(counts + tl.load(chunks_from + s, mask=s <= segments, other=0) * CHUNK, mask=s <= segments, other=0)
    tl.store(out + 1 + s, ones.to(tl.int64), mask=s <= segments)
    last = tl.maximum(tl.load(unary + s * 4 + 3, mask=s < segments, other=0) - 1, 0)
    place = tl.load(places + last, mask=s < segments, other=0)
    tl.store(out + 2 + segments + s, place.to(tl.int64), mask=s < segments)
    tl.store(out, tl.load(runs + blocks).to(tl.int64), mask=p == 0)
