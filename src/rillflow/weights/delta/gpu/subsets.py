"""Kernels that read the tables of segments: a row of every subset that has members, and no others.

A row is eight 64-bit numbers: the first event of the subset and how many events it has; the first bit of the low bits
of its gaps; items; its kind, which is that of the table and flags; the first word of its bitmap; one more number; the
first chunk of its events. A group in which anything changed has rows of its subsets in their order: changed, negative,
longer than 0, 1, …, to one without members, which is also there where the table ends before it. The rows of a segment
begin at a multiple of MOST, which is more than a segment can have.

If the changed weights themselves are coded they have no bitmap, but the first change of the group instead of its first
word. If the others are, the one more number is the first chunk of their bitmap. Of `negative` it is the first change of
the group, and of `longer than l` the first bit of the low bits of changes of length l, less `low_from` of the group.

Bits count from the first byte of the batch's data; events, changes and words of bitmaps from 0 over all segments. A
chunk is a run of at most EVENTS_OF events or changes, or WORDS_OF words, of one owner each, as programs take them.

Whatever the bytes are, nothing outside of the arrays is read or written. A table that is none of groups of these sizes
is a fault, and what is said of its segment then means nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.weights.delta.format import MAX_RICE

# Where things are in a row.
EVENTS = tl.constexpr(0)
NUMBER = tl.constexpr(1)
FIELDS = tl.constexpr(2)
ITEMS = tl.constexpr(3)
KIND = tl.constexpr(4)
WORDS = tl.constexpr(5)
MORE = tl.constexpr(6)
CHUNKS = tl.constexpr(7)
# Flags of a kind beside those of the table: neither all nor no items are members; ranks are what the events give; no
# event of the segment comes before; the subset is that of the changed weights, and the others are coded; it is of
# lengths.
CODED = tl.constexpr(0x100)
RANKS = tl.constexpr(0x200)
FIRST = tl.constexpr(0x400)
OTHERS = tl.constexpr(0x800)
LEVEL = tl.constexpr(0x1000)
# A segment's numbers: first bit of its unary stream and one beyond the last, first event and one beyond the last, rows,
# first bit of its fields.
STREAM = tl.constexpr(8)
# What is counted: faults, events, words, changes, and chunks of the words of unary streams, of events, of the bitmaps
# of groups whose others are coded, and of changes.
FAULTS = tl.constexpr(0)
OF_EVENTS = tl.constexpr(1)
OF_WORDS = tl.constexpr(2)
OF_CHANGES = tl.constexpr(3)
CHUNKS_OF_ONES = tl.constexpr(4)
CHUNKS_OF_EVENTS = tl.constexpr(5)
CHUNKS_OF_OTHERS = tl.constexpr(6)
CHUNKS_OF_CHANGES = tl.constexpr(7)
EVENTS_OF = tl.constexpr(1024)
WORDS_OF = tl.constexpr(256)
_MAX_RICE = tl.constexpr(MAX_RICE)
_VARINT = tl.constexpr(0x8080808080)


@triton.jit
def _bytes_at(data, at):
    """Six bytes and more from byte `at` on: there are three words behind it."""
    w_0 = tl.load(data + (at >> 2)).to(tl.uint32, bitcast=True).to(tl.uint64)
    w_1 = tl.load(data + (at >> 2) + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    w_2 = tl.load(data + (at >> 2) + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    shift = ((at & 3) * 8).to(tl.uint64)
    low, high = w_0 | (w_1 << 32), w_1 | (w_2 << 32)
    return ((low >> shift) & 0xFFFFFFFF) | (((high >> shift) & 0xFFFFFFFF) << 32)


@triton.jit
def _subset(data, at, end, items):
    """Where a subset's numbers end; how many members it has; its kind, with 128 where all items are members; and
    whether it is one."""
    found = _bytes_at(data, at).to(tl.int64, bitcast=True)
    ends = (found & _VARINT) ^ _VARINT
    last = ends & -ends
    some = found & ((last << 1) - 1)
    members = (some & 0x7F) | ((some >> 1) & 0x3F80) | ((some >> 2) & 0x1FC000)
    members |= ((some >> 3) & 0xFE00000) | ((some >> 4) & 0x7F0000000)
    size = 1 + (last > 0x80).to(tl.int64) + (last > 0x8000).to(tl.int64)
    size += (last > 0x800000).to(tl.int64) + (last > 0x80000000).to(tl.int64)
    coded = (members > 0) & (members < items)
    kind = (found >> (8 * size)) & 0xFF
    at += size + coded.to(tl.int64)
    good = (last != 0) & (members <= items) & (at <= end) & ((coded == 0) | ((kind & 127) <= _MAX_RICE))
    kind = tl.where(coded, kind | CODED, tl.where(members > 0, 128, 0))
    return at, members, kind, good


@triton.jit
def _put(rows, row, kind, items, members, events, bits, words, more, chunk):
    """Write a row. Where the next one's events, low bits, words and chunks begin."""
    coded = tl.where((kind & CODED) != 0, tl.where((kind & 128) != 0, items - members, members), 0)
    kind |= tl.where((coded > 0) & (events == 0), FIRST, 0)
    to = rows + row * 8
    tl.store(to + EVENTS, events)
    tl.store(to + NUMBER, coded)
    tl.store(to + FIELDS, bits)
    tl.store(to + ITEMS, items)
    tl.store(to + KIND, kind)
    tl.store(to + WORDS, words)
    tl.store(to + MORE, more)
    tl.store(to + CHUNKS, chunk)
    words += tl.where(((kind & CODED) != 0) & ((kind & RANKS) == 0), (items + 31) >> 5, 0)
    return events + coded, bits + coded * (kind & 127), words, chunk + (coded + (EVENTS_OF - 1)) // EVENTS_OF


@triton.jit
def read(
    data, heads, limits, sizes, rows, changes_from, chunks_from, first_row, low_from, streams, totals,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A segment's table. `heads` say where its bytes begin and how many there are: of none, nothing changed. What is
    written is as if there were no other segments; `settle` adds what comes before."""
    s = tl.program_id(0)
    begin, size, last = tl.load(heads + s * 2), tl.load(heads + s * 2 + 1), tl.load(limits + s * 3 + 2)
    at, end, row = begin + 1 + last, begin + size, s.to(tl.int64) * MOST
    zero = size * 0
    events, bits, words, chunk, changes, others, runs = zero, zero, zero, zero, zero, zero, zero
    good = size >= 0
    c = zero
    while c < CLASSES:
        g = s * CLASSES + c
        tl.store(changes_from + g, changes.to(tl.int32))
        tl.store(chunks_from + g, runs.to(tl.int32))
        tl.store(first_row + g, row.to(tl.int32))
        changed = zero
        if good & (size > 0) & (c <= last):
            items = tl.load(sizes + g).to(tl.int64)
            at, changed, kind, good = _subset(data, at, end, items)
            if good & (changed > 0):
                dense = (kind & 128) != 0
                kind |= tl.where(dense, OTHERS, RANKS)
                to = tl.where(dense, words, changes)
                events, bits, to, chunk = _put(rows, row, kind, items, changed, events, bits, to, others, chunk)
                words = tl.where(dense, to, words)
                others += tl.where(dense, (((items + 31) >> 5) + (WORDS_OF - 1)) // WORDS_OF, 0)
                at, members, kind, good = _subset(data, at, end, changed)
                events, bits, words, chunk = _put(
                    rows, row + 1, kind, changed, members, events, bits, words, changes, chunk
                )  # fmt: skip
                row += 2
                items, level, low = changed, zero, zero
                while good & (items > 0):
                    members, kind = zero, zero
                    if level < WIDTH - 1:
                        at, members, kind, good = _subset(data, at, end, items)
                    events, bits, words, chunk = _put(
                        rows, row, kind | LEVEL, items, members, events, bits, words, low, chunk
                    )  # fmt: skip
                    low += level * (items - members)
                    items = members
                    level += 1
                    row += 1
                # The low bits of changes come behind all gaps of the group.
                tl.store(low_from + g, bits)
                bits += low
                runs += (changed + (EVENTS_OF - 1)) // EVENTS_OF
        changes += changed
        c += 1
    # There may be no more of the data: what is read then is not believed.
    good = good & (at + 4 <= end)
    found = _bytes_at(data, tl.where(good, at, begin))
    stream = (found & 0xFFFFFFFF).to(tl.int64)
    at += 4
    good = (good & (at + stream + ((bits + 7) >> 3) == end) & (stream < (1 << 28))) | (size == 0)
    stream = tl.where(good & (size > 0), stream, 0)
    at = tl.where(good & (size > 0), at, 0)
    to = streams + s * STREAM
    tl.store(to, at * 8)
    tl.store(to + 1, (at + stream) * 8)
    tl.store(to + 4, row - s.to(tl.int64) * MOST)
    tl.store(to + 5, (at + stream) * 8)
    ones = ((((at + stream) * 8 + 31) >> 5) - (at * 8 >> 5) + (WORDS_OF - 1)) // WORDS_OF
    to = totals + s * 8
    tl.store(to + FAULTS, (good == 0).to(tl.int64))
    tl.store(to + OF_EVENTS, events)
    tl.store(to + OF_WORDS, words)
    tl.store(to + OF_CHANGES, changes)
    tl.store(to + CHUNKS_OF_ONES, ones)
    tl.store(to + CHUNKS_OF_EVENTS, chunk)
    tl.store(to + CHUNKS_OF_OTHERS, others)
    tl.store(to + CHUNKS_OF_CHANGES, runs)


@triton.jit(do_not_specialize=["segments"])
def add_up(totals, starts, ends, segments, MANY: tl.constexpr):
    """By one program: what is counted before each segment, and of all."""
    k = tl.arange(0, 8)
    before = tl.zeros([8], tl.int64)
    start = segments * 0
    while start < segments:
        s = start + tl.arange(0, MANY)
        at, valid = s[:, None] * 8 + k[None, :], (s < segments)[:, None]
        some = tl.load(totals + at, mask=valid, other=0)
        tl.store(starts + at, before[None, :] + tl.cumsum(some, 0) - some, mask=valid)
        before += tl.sum(some, 0)
        start += MANY
    tl.store(ends + k, before)


@triton.jit
def _own(owner, start, end, number, MANY: tl.constexpr):
    while start < end:
        at = start + tl.arange(0, MANY)
        tl.store(owner + at, tl.zeros([MANY], tl.int32) + number.to(tl.int32), mask=at < end)
        start += MANY


@triton.jit(do_not_specialize=["segments"])
def settle(
    rows, changes_from, chunks_from, low_from, streams, ones_from, totals, starts, of_ones, of_events, of_others,
    of_changes, segments, CLASSES: tl.constexpr, MOST: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Add what comes before a segment to all that `read` has written of it, and write who owns each chunk: a segment, a
    row, a row, a group."""
    s = tl.program_id(0)
    to, mine = starts + s * 8, totals + s * 8
    events, words, changes = tl.load(to + OF_EVENTS), tl.load(to + OF_WORDS), tl.load(to + OF_CHANGES)
    ones, chunk = tl.load(to + CHUNKS_OF_ONES), tl.load(to + CHUNKS_OF_EVENTS)
    others, runs = tl.load(to + CHUNKS_OF_OTHERS), tl.load(to + CHUNKS_OF_CHANGES)
    number, base = tl.load(streams + s * STREAM + 4), tl.load(streams + s * STREAM + 5)
    tl.store(streams + s * STREAM + 2, events)
    tl.store(streams + s * STREAM + 3, events + tl.load(mine + OF_EVENTS))
    end_of_ones = ones + tl.load(mine + CHUNKS_OF_ONES)
    end_of_changes, end_of_runs = changes + tl.load(mine + OF_CHANGES), runs + tl.load(mine + CHUNKS_OF_CHANGES)
    tl.store(ones_from + s, ones.to(tl.int32))
    if s == segments - 1:
        tl.store(ones_from + segments, end_of_ones.to(tl.int32))
        tl.store(changes_from + segments * CLASSES, end_of_changes.to(tl.int32))
        tl.store(chunks_from + segments * CLASSES, end_of_runs.to(tl.int32))
    _own(of_ones, ones, end_of_ones, s, MANY)
    c = number * 0
    while c < CLASSES:
        g = s * CLASSES + c
        first = tl.load(chunks_from + g)
        beyond = tl.load(chunks_from + g + 1, mask=c + 1 < CLASSES, other=0)
        beyond = tl.where(c + 1 < CLASSES, runs + beyond, end_of_runs)
        _own(of_changes, runs + first, beyond, g, MANY)
        c += 1
    _own_rows(rows, s.to(tl.int64) * MOST, number, of_events, of_others, chunk, others, MANY)
    # What was read above must be as it was, for all threads.
    tl.debug_barrier()
    k = tl.arange(0, CLASSES)
    _add(changes_from + s * CLASSES + k, changes.to(tl.int32), k < CLASSES)
    _add(chunks_from + s * CLASSES + k, runs.to(tl.int32), k < CLASSES)
    _add(low_from + s * CLASSES + k, base, k < CLASSES)
    r = number * 0
    while r < number:
        i = r + tl.arange(0, MANY)
        row, valid = rows + (s.to(tl.int64) * MOST + i) * 8, i < number
        kind = tl.load(row + KIND, mask=valid, other=0)
        _add(row + EVENTS, events, valid)
        _add(row + FIELDS, base, valid)
        _add(row + WORDS, tl.where((kind & RANKS) != 0, changes, words), valid)
        more = tl.where((kind & OTHERS) != 0, others, tl.where((kind & RANKS) != 0, 0, changes))
        _add(row + MORE, tl.where((kind & LEVEL) != 0, 0, more), valid)
        _add(row + CHUNKS, chunk, valid)
        r += MANY


@triton.jit
def _own_rows(rows, row, number, of_events, of_others, chunk, others, MANY: tl.constexpr):
    """Write so many rows to their chunks of events, and to those of the bitmaps of others."""
    end = row + number
    while row < end:
        at = rows + row * 8
        first, count = chunk + tl.load(at + CHUNKS), tl.load(at + NUMBER)
        _own(of_events, first, first + (count + (EVENTS_OF - 1)) // EVENTS_OF, row, MANY)
        if (tl.load(at + KIND) & OTHERS) != 0:
            before, words = others + tl.load(at + MORE), (tl.load(at + ITEMS) + 31) >> 5
            _own(of_others, before, before + (words + (WORDS_OF - 1)) // WORDS_OF, row, MANY)
        row += 1


@triton.jit
def _add(at, number, valid):
    tl.store(at, tl.load(at, mask=valid, other=0) + number, mask=valid)
