"""Small kernels between the large ones: the places of groups, chunks and subsets. Each replaces a dozen launches.

Each segment has a row of eight 64-bit numbers, its totals, all 0 at first: the contributions of the old weights and of
the changes to the fingerprint; bits of its field stream; bits of its unary stream, at most and then in fact; events
beside those of positions; bytes of its table; the first of its bytes (one row more than segments has the end); its
number of changed weights. The bytes of a tensor's first segment begin with room for the header and the checksum of its
delta. Where segments follow one another in an array, a program adds up the totals of all before its own:
there are hundreds, so that costs less than another launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.kernels.delta.format import HEADER_SIZE

FIELDS = tl.constexpr(2)
UNARY = tl.constexpr(3)
REST = tl.constexpr(4)
TABLE = tl.constexpr(5)
BEGIN = tl.constexpr(6)
CHANGED = tl.constexpr(7)
# Bytes of a delta's header with its checksum, of a segment's head, and of the length of a unary stream.
HEADER = tl.constexpr(HEADER_SIZE)
HEAD = tl.constexpr(5)
LENGTH = tl.constexpr(4)


@triton.jit
def own(starts, out, MANY: tl.constexpr):
    """Write the number of the row to all that are its own: from its start to the next one's."""
    p = tl.program_id(0)
    _own(out, tl.load(starts + p), tl.load(starts + p + 1), MANY)


@triton.jit
def _own(out, start, end, MANY: tl.constexpr):
    p = tl.program_id(0)
    while start < end:
        at = start + tl.arange(0, MANY)
        tl.store(out + at, tl.zeros([MANY], tl.int32) + p, mask=at < end)
        start += MANY


@triton.jit
def spread(rows, table, owner, MANY: tl.constexpr):
    """Copy a row that the host has written to the table of segments (see `compare`), and write the segment's number to
    all its blocks."""
    p = tl.program_id(0)
    k = tl.arange(0, 8)
    row = tl.load(rows + p * 8 + k)
    tl.store(table + p * 8 + k, row)
    first = tl.sum(tl.where(k == 4, row, 0)).to(tl.int32)
    _own(owner, first, tl.sum(tl.where(k == 6, row, 0)).to(tl.int32), MANY)


@triton.jit(do_not_specialize=["number"])
def land(source, to, number, MANY: tl.constexpr):
    """Copy numbers."""
    i = tl.program_id(0) * MANY + tl.arange(0, MANY)
    tl.store(to + i, tl.load(source + i, mask=i < number, other=0), mask=i < number)


@triton.jit(do_not_specialize=["number"])
def clear(to, number, MANY: tl.constexpr):
    """Write zeros."""
    i = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    tl.store(to + i, tl.zeros([MANY], to.dtype.element_ty), mask=i < number)


@triton.jit(do_not_specialize=["groups", "all_sizes"])
def group(
    table, choices, sums, groups, all_sizes, group_sizes, changes_from, modes, positions_from, chunks_from, cursor,
    ends, CLASSES: tl.constexpr, CHUNK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """By one program, of all groups: sizes, modes (see `compare.sort`), where changes, coded positions and chunks of
    changes begin, and at last where they end. `ends` gets the number of records and the three last numbers.

    `sums` are prefix sums of the sizes of groups by block and, behind these, of their changes.
    """
    zero = tl.load(sums + all_sizes)
    positions, chunks = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    start = groups * 0
    while start < groups:
        g = start + tl.arange(0, MANY)
        valid = g < groups
        s, c = g // CLASSES, g % CLASSES
        blocks = tl.load(table + s * 8 + 5, mask=valid, other=0)
        at = tl.load(table + s * 8 + 4, mask=valid, other=0) * CLASSES + c * blocks
        size = tl.load(sums + at + blocks, mask=valid, other=0) - tl.load(sums + at, mask=valid, other=0)
        begin = tl.load(sums + all_sizes + at, mask=valid, other=0)
        changed = tl.load(sums + all_sizes + at + blocks, mask=valid, other=0) - begin
        dense = (tl.load(choices + s * 4 + 1, mask=valid, other=0) >> (c * 8).to(tl.int64)) & 1
        mode = tl.where((changed > 0) & (changed < size), 1 + dense.to(tl.int32), 0)
        coded = tl.where(mode == 2, size - changed, tl.where(mode == 1, changed, 0)).to(tl.int64)
        number = (changed + (CHUNK - 1)) // CHUNK
        tl.store(group_sizes + g, size, mask=valid)
        tl.store(changes_from + g, begin - zero, mask=valid)
        tl.store(modes + g, mode, mask=valid)
        tl.store(positions_from + g, positions + tl.cumsum(coded, 0) - coded, mask=valid)
        tl.store(chunks_from + g, chunks + tl.cumsum(number, 0) - number, mask=valid)
        positions += tl.sum(coded)
        chunks += tl.sum(number)
        start += MANY
    changes = tl.load(sums + 2 * all_sizes) - zero
    tl.store(changes_from + groups, changes)
    tl.store(positions_from + groups, positions)
    tl.store(chunks_from + groups, chunks)
    tl.store(ends, tl.load(cursor))
    tl.store(ends + 1, changes.to(tl.int64))
    tl.store(ends + 2, positions)
    tl.store(ends + 3, chunks.to(tl.int64))


@triton.jit
def _header(table, s, valid):
    """The room before segments for the headers of their deltas: only the first word of a tensor has one."""
    return tl.where(tl.load(table + s * 8 + 3, mask=valid, other=1) == 0, HEADER, 0)


@triton.jit(do_not_specialize=["segments"])
def place_events(
    table, totals, segments, bits, coded, positions_from, fields_from, events_from, ends, CLASSES: tl.constexpr,
    COLUMNS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Where each subset's events begin, and where each column's bits do when each segment's fields begin at a word.

    The events of positions come first, then all others. A program more than there are segments gives `ends`: the number
    of these others, the words of all fields, those of the unary streams and the bytes of all segments at most.
    """
    N: tl.constexpr = CLASSES * COLUMNS
    p = tl.program_id(0)
    rest, words = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    most, size = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    start = p * 0
    while start < p:
        s = start + tl.arange(0, MANY)
        rest += tl.sum(tl.load(totals + s * 8 + REST, mask=s < p, other=0))
        fields = tl.load(totals + s * 8 + FIELDS, mask=s < p, other=0)
        unary = tl.load(totals + s * 8 + UNARY, mask=s < p, other=0)
        words += tl.sum((fields + 31) >> 5)
        most += tl.sum((unary + 31) >> 5)
        room = _header(table, s, s < p) + HEAD + tl.load(totals + s * 8 + TABLE, mask=s < p, other=0) + LENGTH
        size += tl.sum(tl.where(s < p, room + ((unary + 7) >> 3) + ((fields + 7) >> 3), 0))
        start += MANY
    if p == segments:
        tl.store(ends, rest)
        tl.store(ends + 1, words)
        tl.store(ends + 2, most)
        tl.store(ends + 3, size)
    else:
        i = tl.arange(0, N)
        of_positions = (i % COLUMNS) == 0
        some = tl.load(bits + p * N + i).to(tl.int64)
        tl.store(fields_from + p * N + i, words * 32 + tl.cumsum(some, 0) - some)
        others = tl.where(of_positions, 0, tl.load(coded + p * N + i)).to(tl.int64)
        first = tl.load(positions_from + segments * CLASSES) + rest + tl.cumsum(others, 0) - others
        first = tl.where(of_positions, tl.load(positions_from + p * CLASSES + i // COLUMNS), first)
        tl.store(events_from + p * N + i, first)


@triton.jit
def _unary_bits(totals, positions_from, events_from, sums, s, valid, CLASSES: tl.constexpr, COLUMNS: tl.constexpr):
    """Of segments, from the prefix sums of all events' bits: positions are in a row, and so are the others."""
    begin = tl.load(positions_from + s * CLASSES, mask=valid, other=0)
    end = tl.load(positions_from + (s + 1) * CLASSES, mask=valid, other=0)
    found = tl.load(sums + end, mask=valid, other=0) - tl.load(sums + begin, mask=valid, other=0)
    # The second column's events are a segment's first that are not of positions.
    begin = tl.load(events_from + s * (CLASSES * COLUMNS) + 1, mask=valid, other=0)
    end = begin + tl.load(totals + s * 8 + REST, mask=valid, other=0)
    return found + tl.load(sums + end, mask=valid, other=0) - tl.load(sums + begin, mask=valid, other=0)


@triton.jit
def _size(table, totals, changes_from, unary, s, valid, CLASSES: tl.constexpr, BYTES: tl.constexpr):
    """The bytes of segments, with the room before them: a coded one is smaller than its weights are."""
    changed = tl.load(changes_from + (s + 1) * CLASSES, mask=valid, other=0)
    changed -= tl.load(changes_from + s * CLASSES, mask=valid, other=0)
    fields = tl.load(totals + s * 8 + FIELDS, mask=valid, other=0)
    coded = tl.load(totals + s * 8 + TABLE, mask=valid, other=0) + LENGTH + ((unary + 7) >> 3) + ((fields + 7) >> 3)
    coded = tl.minimum(coded, tl.load(table + s * 8 + 2, mask=valid, other=0) * BYTES)
    return tl.where(valid, _header(table, s, valid) + HEAD + tl.where(changed > 0, coded, 0), 0)


@triton.jit(do_not_specialize=["segments", "first_word"])
def place_streams(
    table, totals, segments, changes_from, positions_from, events_from, coded, sums, first_word, unary_from,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, BYTES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Where each subset's unary bits begin when each segment's begin at a word, the first one's at `first_word`; and
    where each segment's bytes begin when they are in a row. A program more than there are segments gives the end.

    `sums` are prefix sums of the bits of events. BYTES are those of a weight.
    """
    N: tl.constexpr = CLASSES * COLUMNS
    p = tl.program_id(0)
    words, begin = tl.full([], 0, tl.int64) + first_word, tl.full([], 0, tl.int64)
    start = p * 0
    while start < p:
        s = start + tl.arange(0, MANY)
        unary = _unary_bits(totals, positions_from, events_from, sums, s, s < p, CLASSES, COLUMNS).to(tl.int64)
        size = _size(table, totals, changes_from, unary, s, s < p, CLASSES, BYTES)
        words += tl.sum((unary + 31) >> 5)
        begin += tl.sum(size)
        start += MANY
    tl.store(totals + p * 8 + BEGIN, begin)
    if p < segments:
        i = tl.arange(0, N)
        first = tl.load(events_from + p * N + i)
        end = first + tl.load(coded + p * N + i)
        some = (tl.load(sums + end) - tl.load(sums + first)).to(tl.int64)
        tl.store(unary_from + p * N + i, words * 32 + tl.cumsum(some, 0) - some)
        tl.store(totals + p * 8 + UNARY, tl.sum(some))
        changed = tl.load(changes_from + (p + 1) * CLASSES) - tl.load(changes_from + p * CLASSES)
        tl.store(totals + p * 8 + CHANGED, changed.to(tl.int64))


@triton.jit
def pack(
    table, totals, fields_from, unary_from, streams, out, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    BYTES: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Copy a part of the bytes of a segment to its place behind those before: both its streams, or its new weights
    where these are no more. The host writes header, head and table into the room that is left before them."""
    N: tl.constexpr = CLASSES * COLUMNS
    streams = streams.to(tl.pointer_type(tl.uint8))
    s, start = tl.program_id(0), tl.program_id(1) * MANY
    begin = tl.load(totals + s * 8 + BEGIN) + _header(table, s, True) + HEAD
    size = tl.load(totals + s * 8 + 8 + BEGIN) - begin
    if size == tl.load(table + s * 8 + 2) * BYTES:
        weights = tl.load(table + s * 8 + 1).to(tl.pointer_type(tl.uint8))
        while start < size:
            i = start + tl.arange(0, MANY)
            tl.store(out + begin + i, tl.load(weights + i, mask=i < size, other=0), mask=i < size)
            start += PARTS * MANY
    else:
        room = tl.load(totals + s * 8 + TABLE) + LENGTH
        size, begin = size - room, begin + room
        unary = (tl.load(totals + s * 8 + UNARY) + 7) >> 3
        first = tl.load(unary_from + s * N) >> 3
        # The bytes of the fields, as if they began with those of the unary stream.
        second = (tl.load(fields_from + s * N) >> 3) - unary
        while start < size:
            i = start + tl.arange(0, MANY)
            at = i + tl.where(i < unary, first, second)
            tl.store(out + begin + i, tl.load(streams + at, mask=i < size, other=0), mask=i < size)
            start += PARTS * MANY
