"""Small kernels between the large ones: which group, chunk and subset is where. Each is a launch instead of a dozen.

Of each segment there is a row of eight 64-bit numbers, its totals, all 0 at first: what the old weights and what the
changes add to the fingerprint; bits of its field stream; bits of its unary stream, at most and then in fact; events
beside those of positions. Where segments follow one another in an array, a program adds up the totals of all before
its own: there are hundreds, so that costs less than another launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(2)
UNARY = tl.constexpr(3)
REST = tl.constexpr(4)


@triton.jit
def own(starts, out, FIRST: tl.constexpr, LAST: tl.constexpr, STRIDE: tl.constexpr, MANY: tl.constexpr):
    """Write the number of the row to all that are its own: from column FIRST to before column LAST."""
    p = tl.program_id(0)
    start, end = tl.load(starts + p * STRIDE + FIRST).to(tl.int32), tl.load(starts + p * STRIDE + LAST).to(tl.int32)
    while start < end:
        at = start + tl.arange(0, MANY)
        tl.store(out + at, tl.zeros([MANY], tl.int32) + p, mask=at < end)
        start += MANY


@triton.jit(do_not_specialize=["groups", "all_sizes"])
def group(
    table, choices, sums, groups, all_sizes, group_sizes, changes_from, modes, positions_from, chunks_from, ends,
    CLASSES: tl.constexpr, CHUNK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """By one program, of all groups: sizes, modes (see `compare.sort`), where changes, coded positions and chunks of
    changes begin, and at last where they end. `ends` gets the three last numbers.

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
    tl.store(ends, changes.to(tl.int64))
    tl.store(ends + 1, positions)
    tl.store(ends + 2, chunks.to(tl.int64))


@triton.jit(do_not_specialize=["segments"])
def place_events(
    totals, segments, bits, coded, positions_from, fields_from, events_from, ends, CLASSES: tl.constexpr,
    COLUMNS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Where each subset's events begin, and where each column's bits do when each segment's fields begin at a word.

    The events of positions come first, then all others. A program more than there are segments gives `ends`: the number
    of these others, the words of all fields, and those of the unary streams at most.
    """
    N: tl.constexpr = CLASSES * COLUMNS
    p = tl.program_id(0)
    rest, words, most = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    start = p * 0
    while start < p:
        s = start + tl.arange(0, MANY)
        rest += tl.sum(tl.load(totals + s * 8 + REST, mask=s < p, other=0))
        words += tl.sum((tl.load(totals + s * 8 + FIELDS, mask=s < p, other=0) + 31) >> 5)
        most += tl.sum((tl.load(totals + s * 8 + UNARY, mask=s < p, other=0) + 31) >> 5)
        start += MANY
    if p == segments:
        tl.store(ends, rest)
        tl.store(ends + 1, words)
        tl.store(ends + 2, most)
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


@triton.jit(do_not_specialize=["first_word"])
def place_unary(
    totals, positions_from, events_from, coded, sums, first_word, unary_from, CLASSES: tl.constexpr,
    COLUMNS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Where each subset's unary bits begin when each segment's begin at a word, the first one's at `first_word`; and
    how many each segment has. `sums` are prefix sums of the bits of events."""
    N: tl.constexpr = CLASSES * COLUMNS
    p = tl.program_id(0)
    words = tl.full([], 0, tl.int64) + first_word
    start = p * 0
    while start < p:
        s = start + tl.arange(0, MANY)
        found = _unary_bits(totals, positions_from, events_from, sums, s, s < p, CLASSES, COLUMNS)
        words += tl.sum(((found + 31) >> 5).to(tl.int64))
        start += MANY
    i = tl.arange(0, N)
    first = tl.load(events_from + p * N + i)
    end = first + tl.load(coded + p * N + i)
    some = (tl.load(sums + end) - tl.load(sums + first)).to(tl.int64)
    tl.store(unary_from + p * N + i, words * 32 + tl.cumsum(some, 0) - some)
    tl.store(totals + p * 8 + UNARY, tl.sum(some))
