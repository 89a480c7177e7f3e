"""Kernels that read the streams of deltas: the ranks of changed weights in their groups, and their changes.

Where changed weights are coded, their events give their ranks in order. Every other subset becomes a bitmap over its
items, with prefix sums of its ones: whether an item is a member and how many members come before it can then be asked
for any item, at any time, by any program.

The rows of subsets are those of `subsets`. Whatever the bytes are, nothing outside of the arrays is read or written:
indices that cannot be are masked and set `fault`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.weights.delta.gpu.subsets import (
    CHUNKS,
    CODED,
    EVENTS,
    FIELDS,
    FIRST,
    ITEMS,
    KIND,
    MORE,
    NUMBER,
    RANKS,
    STREAM,
    WORDS,
)
from rillflow.weights.delta.gpu.words import popcount


@triton.jit
def _unary_words(data, unary, owner, chunks_from, CHUNK: tl.constexpr):
    """A chunk of words of a segment's unary stream, all other bits 0."""
    p = tl.program_id(0)
    s = tl.load(owner + p)
    begin, end = tl.load(unary + s * STREAM), tl.load(unary + s * STREAM + 1)
    word = (begin >> 5) + (p - tl.load(chunks_from + s)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    bit = word * 32
    words = tl.load(data + word, mask=bit < end, other=0)
    low = tl.maximum(begin - bit, 0)
    high = tl.minimum(tl.maximum(end - bit, 0), 32)
    keep = ((tl.full([1], 1, tl.int64) << high) - (tl.full([1], 1, tl.int64) << tl.minimum(low, high))).to(tl.int32)
    return words & keep


@triton.jit
def _sum_of(numbers, start, end, MANY: tl.constexpr):
    """Of the numbers from `start` to before `end`."""
    found = tl.zeros([MANY], tl.int32)
    while start < end:
        i = start + tl.arange(0, MANY)
        found += tl.load(numbers + i, mask=i < end, other=0)
        start += MANY
    return tl.sum(found)


@triton.jit
def count_ones(data, unary, owner, chunks_from, words, before, counts, CHUNK: tl.constexpr):
    """The words of a chunk, how many one-bits of it come before each, and how many it has."""
    found = _unary_words(data, unary, owner, chunks_from, CHUNK)
    p = tl.program_id(0)
    i = p * CHUNK + tl.arange(0, CHUNK)
    ones = popcount(found)
    tl.store(words + i, found)
    tl.store(before + i, tl.cumsum(ones, 0) - ones)
    tl.store(counts + p, tl.sum(ones))


@triton.jit
def find_ones(
    words, before, counts, unary, owner, chunks_from, places, seen, CHUNK: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """Where each one-bit is in its stream: the ends of the events, in order. `seen` gets how many each stream has.

    A lane for each bit: what is of a word is only loaded here, since all lanes of the word do it."""
    p = tl.program_id(0)
    s = tl.load(owner + p)
    chunk = tl.load(chunks_from + s)
    passed = _sum_of(counts, chunk, p, MANY)
    all = passed + tl.load(counts + p)
    tl.store(seen + s, all.to(tl.int64), mask=p + 1 == tl.load(chunks_from + s + 1))
    end = tl.load(unary + s * STREAM + 3).to(tl.int32)
    first = tl.load(unary + s * STREAM + 2).to(tl.int32) + passed
    start = ((p - chunk) * (CHUNK * 32)) - (tl.load(unary + s * STREAM) & 31).to(tl.int32)
    bit, k = tl.arange(0, CHUNK * 32), tl.arange(0, CHUNK * 32) & 31
    word = p * CHUNK + (bit >> 5)
    ones = tl.load(words + word)
    event = first + tl.load(before + word) + popcount(ones & ((tl.full([1], 1, tl.int32) << k) - 1))
    tl.store(places + event, start + bit, mask=(((ones >> k) & 1) != 0) & (event < end))


@triton.jit(do_not_specialize=["segments"])
def check_ones(unary, places, seen, fault, segments, MANY: tl.constexpr):
    """That the unary streams have as many one-bits as the tables say, given how many each has, and that the last one is
    in the last byte: nothing may follow it."""
    s = tl.program_id(0) * MANY + tl.arange(0, MANY)
    valid = s < segments
    at = unary + s * STREAM
    begin, end = tl.load(at, mask=valid, other=0), tl.load(at + 1, mask=valid, other=0)
    first, beyond = tl.load(at + 2, mask=valid, other=0), tl.load(at + 3, mask=valid, other=0)
    last = tl.load(places + beyond - 1, mask=valid & (beyond > first), other=-8) // 8 + 1
    wrong = (tl.load(seen + s, mask=valid, other=0) != beyond - first) | (last != (end - begin) // 8)
    tl.store(fault + s * 0, 1, mask=valid & wrong)


@triton.jit
def _bits_at(data, at, width, valid):
    """`width` (at most 31) bits from bit `at` on. The data have a word more than they need."""
    word = at >> 5
    low = tl.load(data + word, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(data + word + 1, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF
    window = (high << 32) | low
    return ((window >> (at & 31)) & ((tl.full([1], 1, tl.int64) << width) - 1)).to(tl.int32)


@triton.jit
def _events(owner, rows, CHUNK: tl.constexpr):
    """A chunk of events of one coded subset: the subset's row, their order in it, and which are there."""
    p = tl.program_id(0)
    row = rows + tl.load(owner + p) * 8
    order = (p - tl.load(row + CHUNKS).to(tl.int32)) * CHUNK + tl.arange(0, CHUNK)
    return row, order, order < tl.load(row + NUMBER)


@triton.jit
def _low_bits(data, row, order, valid, rice):
    """The low bits of the gaps of a subset's events."""
    at = tl.load(row + FIELDS) + order.to(tl.int64) * rice
    return _bits_at(data, at, rice, valid & (rice > 0))


@triton.jit
def low_sums(data, owner, rows, out, CHUNK: tl.constexpr):
    """The sum of the low bits of the gaps of each chunk of events."""
    row, order, valid = _events(owner, rows, CHUNK)
    low = _low_bits(data, row, order, valid, tl.load(row + KIND) & 127)
    tl.store(out + tl.program_id(0), tl.sum(low, 0))


@triton.jit
def mark(data, owner, rows, places, lows, bitmap, ranks, fault, CHUNK: tl.constexpr, MANY: tl.constexpr):
    """The rank of each changed weight where the changed ones are coded; of all other subsets, the bit of each event's
    item.

    An item is the sum of the gaps up to its own. The sum of their unary parts is what the place of its one-bit is
    beyond the subset's first bit, less the one-bits among them; `lows` are the sums of the other parts of each chunk.
    """
    p = tl.program_id(0)
    row, order, valid = _events(owner, rows, CHUNK)
    first, kind = tl.load(row + EVENTS), tl.load(row + KIND)
    before = tl.load(places + first - 1, mask=(kind & FIRST) == 0, other=-1)
    low = _low_bits(data, row, order, valid, kind & 127)
    low = tl.cumsum(low, 0) + _sum_of(lows, tl.load(row + CHUNKS).to(tl.int32), p, MANY)
    place = tl.load(places + first + order, mask=valid, other=0)
    wide = ((place - before - order - 1).to(tl.int64) << (kind & 127)) + (low + order).to(tl.int64)
    wrong = valid & ((wide < 0) | (wide >= tl.load(row + ITEMS)))
    item = wide.to(tl.int32)
    tl.store(fault + item * 0, 1, mask=wrong)
    good = valid & (wrong == 0)
    to = tl.load(row + WORDS)
    if (kind & RANKS) != 0:
        tl.store(ranks + to + order, item, mask=good)
    else:
        bit = tl.full([CHUNK], 1, tl.int32) << (item & 31)
        tl.atomic_or(bitmap + to + (item >> 5), bit, mask=good, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def count_bits(bitmap, counts, number, CHUNK: tl.constexpr):
    """How many one-bits a chunk of words has."""
    p = tl.program_id(0)
    i = p.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(counts + p, tl.sum(popcount(tl.load(bitmap + i, mask=i < number, other=0))))


@triton.jit(do_not_specialize=["number"])
def rank_bits(bitmap, counts, before, number, CHUNK: tl.constexpr, MANY: tl.constexpr):
    """How many one-bits come before each word, of all bitmaps."""
    p = tl.program_id(0)
    i = p.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    ones = popcount(tl.load(bitmap + i, mask=i < number, other=0))
    tl.store(before + i, _sum_of(counts, p * 0, p, MANY) + tl.cumsum(ones, 0) - ones, mask=i < number)


@triton.jit
def _ones_before(bitmap, before, first, item, valid):
    """The bitmap's word of each item, and how many ones of the subset that begins at word `first` come before it."""
    word = first + (item >> 5)
    bits = tl.load(bitmap + word, mask=valid, other=0)
    below = ((tl.full([1], 1, tl.int64) << (item & 31).to(tl.int64)) - 1).to(tl.int32)
    ones = tl.load(before + word, mask=valid, other=0) - tl.load(before + first + item * 0, mask=valid, other=0)
    return bits, ones + popcount(bits & below)


@triton.jit
def changes(
    data, owner, chunks_from, changes_from, first_row, low_from, rows, bitmap, before, out, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The changes of a chunk: each follows the subsets of lengths down to its own, of which it is no member."""
    p = tl.program_id(0)
    g = tl.load(owner + p)
    start = tl.load(changes_from + g)
    index = (p - tl.load(chunks_from + g)) * CHUNK + tl.arange(0, CHUNK)
    valid = index < tl.load(changes_from + g + 1) - start
    row = rows + tl.load(first_row + g) * 8 + 8
    kind = tl.load(row + KIND)
    word = tl.load(row + WORDS) + (index >> 5)
    bits = tl.load(bitmap + word, mask=valid & ((kind & CODED) != 0), other=0)
    negative = (((bits >> (index & 31)) & 1) != 0) != ((kind & 128) != 0)
    item, active = index, valid
    length, order = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    from_bit = tl.zeros([CHUNK], tl.int64)
    here = index < 0
    level = g * 0
    # The last row has no members.
    while (level < WIDTH) & (tl.max(active.to(tl.int32)) != 0):
        row += 8
        kind, items, number = tl.load(row + KIND), tl.load(row + ITEMS), tl.load(row + NUMBER)
        coded, inverted = (kind & CODED) != 0, (kind & 128) != 0
        exact = tl.where(coded, tl.where(inverted, number, items - number), tl.where(inverted, 0, items))
        active = active & (item < items)
        bits, ones = _ones_before(bitmap, before, tl.load(row + WORDS), item, active & coded)
        member = (((bits >> (item & 31)) & 1) != 0) != inverted
        members = tl.where(inverted, item - ones, ones)
        ends = active & (member == 0)
        order = tl.where(ends, item - members, order)
        length = tl.where(ends, level, length)
        from_bit = tl.where(ends, tl.load(row + MORE), from_bit)
        here = here | (ends & (item - members < exact) & (level > 0))
        active = active & member
        item = tl.where(active, members, item)
        level += 1
    from_bit += tl.load(low_from + g)
    size = _bits_at(data, from_bit + order.to(tl.int64) * length, length.to(tl.int64), here).to(tl.int64)
    size += tl.full([1], 1, tl.int64) << length.to(tl.int64)
    tl.store(out + start + index, tl.where(negative, -size, size).to(out.dtype.element_ty), mask=valid)


@triton.jit
def members(owner, rows, bitmap, before, ranks, CHUNK: tl.constexpr):
    """The ranks of the changed weights of groups whose other ones are marked: a chunk is of words of their bitmap."""
    p = tl.program_id(0)
    row = rows + tl.load(owner + p) * 8
    items, first, coded = tl.load(row + ITEMS), tl.load(row + WORDS), (tl.load(row + KIND) & CODED) != 0
    word = (p - tl.load(row + MORE).to(tl.int32)) * CHUNK + tl.arange(0, CHUNK)
    valid = (word * 32 < items) & coded
    others = tl.load(bitmap + first + word, mask=valid, other=0)
    ones = tl.load(before + first + word, mask=valid, other=0) - tl.load(before + first, mask=coded, other=0)
    k = tl.arange(0, 32)[None, :]
    item = word[:, None] * 32 + k
    below = others[:, None] & ((tl.full([1, 1], 1, tl.int32) << k) - 1)
    # Those of the changes are in the next row, of signs.
    start, number = tl.load(row + 8 + MORE), tl.load(row + 8 + ITEMS)
    order = item - ones[:, None] - popcount(below)
    mask = (item < items) & (((others[:, None] >> k) & 1) == 0)
    tl.store(ranks + start + order, item, mask=mask & (order < number))
