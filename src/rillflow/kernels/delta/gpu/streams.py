"""Kernels that write subsets: the table's numbers, the events in their order, and the two bit streams.

A group has 2 * WIDTH columns: 0 changed, 1 negative, 2 + l longer than l, up to WIDTH; from WIDTH + 1 on, WIDTH + l,
the low bits of changes of length l. A chunk is a run of CHUNK changes of one group. Events are in two arrays, those of
positions and the rest, which are counted as if they were one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.kernels.delta.gpu.places import FIELDS, REST, TABLE, UNARY
from rillflow.kernels.delta.gpu.words import add_runs, length_of, put_bits

MAX_RICE = tl.constexpr(22)


@triton.jit
def _chunk(owner, chunks_from, changes_from, changes, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Group, index of the first change in it, indices, validity, change and length of the changes of a chunk."""
    p = tl.program_id(0)
    g = tl.load(owner + p)
    begin = (p - tl.load(chunks_from + g)) * CHUNK
    index = begin + tl.arange(0, CHUNK)
    start = tl.load(changes_from + g)
    valid = index < tl.load(changes_from + g + 1) - start
    change = tl.load(changes + start + index, mask=valid, other=0)
    size = tl.abs(change.to(tl.int64)) if WIDTH == 32 else tl.abs(change)
    return g, begin, index, valid, change, size, length_of(size, WIDTH)


@triton.jit(do_not_specialize=["stride"])
def count(owner, chunks_from, changes_from, changes, counts, stride, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """How many changes of a chunk have each length, and in row WIDTH how many are negative; all after a 0."""
    _, _, _, valid, change, _, length = _chunk(owner, chunks_from, changes_from, changes, CHUNK, WIDTH)
    found = tl.histogram(tl.where(valid, length, 2 * WIDTH - 1), 2 * WIDTH)
    row = tl.arange(0, 2 * WIDTH)
    found = tl.where(row == WIDTH, tl.sum((change < 0).to(tl.int32)), found)
    if tl.program_id(0) == 0:
        tl.store(counts, 0)
    tl.store(counts + 1 + row * stride + tl.program_id(0), found, mask=row <= WIDTH)


@triton.jit(do_not_specialize=["stride"])
def plan(
    choices, group_sizes, changes_from, chunks_from, modes, counts, stride, total_out, members_out, kind_out, coded_out,
    bits_out, totals, CLASSES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The columns of a group: items, members, Rice parameter and inversion, coded items, field bits; and the totals.

    The parameter is the best one for gaps of evenly spread items. `counts` are exclusive prefix sums now.
    """
    g = tl.program_id(0)
    column, length = tl.arange(0, 2 * WIDTH), tl.arange(0, WIDTH)
    begin, end = tl.load(chunks_from + g), tl.load(chunks_from + g + 1)
    having = tl.load(counts + length * stride + end) - tl.load(counts + length * stride + begin)
    negative = tl.load(counts + WIDTH * stride + end) - tl.load(counts + WIDTH * stride + begin)
    changed = tl.load(changes_from + g + 1) - tl.load(changes_from + g)
    level = column[:, None] - 2
    total = tl.sum(tl.where(length[None, :] >= level, having[None, :], 0), 1)
    members = tl.sum(tl.where(length[None, :] > level, having[None, :], 0), 1)
    total = tl.where(column == 0, tl.load(group_sizes + g), tl.where(column == 1, changed, total))
    members = tl.where(column == 0, changed, tl.where(column == 1, negative, members))
    subset = column <= WIDTH
    mode = tl.load(modes + g)
    inverted = tl.where(column == 0, mode == 2, 2 * members > total)
    written = subset & (members > 0) & (members < total)
    coded = tl.where(written, tl.where(inverted, total - members, members), 0)
    rice = _best_rice(coded, total)
    exact = tl.sum(tl.where(length[None, :] == (column - WIDTH)[:, None], having[None, :], 0), 1)
    bits = tl.where(subset, coded * rice, exact * (column - WIDTH))
    to = g * (2 * WIDTH) + column
    tl.store(total_out + to, total)
    tl.store(members_out + to, members)
    tl.store(kind_out + to, rice | tl.where(inverted, 128, 0))
    tl.store(coded_out + to, coded)
    tl.store(bits_out + to, bits)
    s, c = g // CLASSES, g % CLASSES
    row = totals + s * 8
    size, last = _table_bytes(total, members, written, subset), tl.load(choices + s * 4 + 2).to(tl.int32)
    size = tl.where(c <= last, size, 0) + tl.where(c == 0, 1 + last, 0)
    tl.atomic_add(row + TABLE, size.to(tl.int64), sem="relaxed")
    tl.atomic_add(row + FIELDS, tl.sum(bits.to(tl.int64)), sem="relaxed")
    tl.atomic_add(row + UNARY, tl.sum((coded + ((total - coded) >> rice)).to(tl.int64)), sem="relaxed")
    tl.atomic_add(row + REST, tl.sum(tl.where(column > 0, coded, 0).to(tl.int64)), sem="relaxed")


@triton.jit
def _table_bytes(total, members, written, subset):
    """Return the bytes of a group's subsets, which are in the table up to the first empty one: see `tables.write`."""
    varint = 1 + (members > 0x7F).to(tl.int32) + (members > 0x3FFF).to(tl.int32) + (members > 0x1FFFFF).to(tl.int32)
    # An empty subset is the last one: the next one has no items. The first one is always there.
    there = subset & ((total > 0) | (tl.arange(0, total.shape[0]) == 0))
    return tl.sum(tl.where(there, varint + written.to(tl.int32), 0))


@triton.jit
def _best_rice(coded, total):
    """Return the parameter of the fewest expected bits, rice + 1 / (1 - (1 - density) ** 2**rice), for random items."""
    stay = 1.0 - coded.to(tl.float32) / tl.maximum(total, 1).to(tl.float32)
    best = tl.zeros_like(stay) + 1e30
    rice = tl.zeros_like(coded)
    for r in range(MAX_RICE + 1):
        bits = r + 1.0 / tl.maximum(1.0 - stay, 1e-9)
        rice = tl.where(bits < best, r, rice)
        best = tl.minimum(bits, best)
        stay = stay * stay
    return rice


@triton.jit(do_not_specialize=["stride", "positions"])
def emit(
    owner, chunks_from, changes_from, changes, counts, stride, kinds, coded, events_from, fields_from, events, fields,
    positions, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The events of the signs and lengths of a chunk, and the low bits of its changes. `positions` events come before
    the first one of `events`."""
    g, begin, index, valid, change, size, length = _chunk(owner, chunks_from, changes_from, changes, CHUNK, WIDTH)
    p, first = tl.program_id(0), tl.load(chunks_from + g)
    columns = g * (2 * WIDTH)
    events -= positions
    negative = change < 0
    before = tl.load(counts + WIDTH * stride + p) - tl.load(counts + WIDTH * stride + first)
    in_front = before + tl.cumsum(negative.to(tl.int32), 0) - negative.to(tl.int32)
    _event(kinds, coded, events_from, events, columns + 1, index, in_front, negative, valid)
    item, items = index, begin
    longest = tl.max(tl.where(valid, length, 0))
    level = longest * 0
    while level <= longest:
        cell = counts + level * stride
        items -= tl.load(cell + p) - tl.load(cell + first)
        active, longer = valid & (length >= level), valid & (length > level)
        in_front = items + tl.cumsum(longer.to(tl.int32), 0) - longer.to(tl.int32)
        if level < WIDTH - 1:
            _event(kinds, coded, events_from, events, columns + 2 + level, item, in_front, longer, active)
        if level > 0:
            ends = active & (length == level)
            to = tl.load(fields_from + columns + WIDTH + level) + (item - in_front).to(tl.int64) * level
            put_bits(fields, to, size - (tl.full([1], 1, size.dtype) << level), ends)
        item = in_front
        level += 1


@triton.jit
def _event(kinds, coded, events_from, events, subset, item, in_front, member, valid):
    """`in_front` is the number of members before each item."""
    inverted = (tl.load(kinds + subset) & 128) != 0
    order = tl.where(inverted, item - in_front, in_front)
    to = tl.load(events_from + subset) + order
    event = (subset.to(tl.int64) << 32) | item.to(tl.int64)
    tl.store(events + to, event, mask=valid & (member != inverted) & (tl.load(coded + subset) > 0))


@triton.jit
def _event_at(positions, rest, split, i, valid):
    """Event i of both arrays, the first of which has `split`; -1 where it is not valid."""
    first = tl.load(positions + i, mask=valid & (i < split), other=-1)
    return tl.where(i < split, first, tl.load(rest + (i - split), mask=valid & (i >= split), other=-1))


@triton.jit
def _neighbours(positions, rest, split, number, subset, i, lane, CHUNK: tl.constexpr):
    """Return if event i is the first, and if it is the last, that this chunk has of its subset."""
    before = _event_at(positions, rest, split, i - 1, (lane > 0) & (i < number)) >> 32
    after = _event_at(positions, rest, split, i + 1, (lane < CHUNK - 1) & (i + 1 < number)) >> 32
    return before != subset, after != subset


@triton.jit(do_not_specialize=["split", "number"])
def gaps(positions, rest, split, number, kinds, events_from, fields_from, sizes, fields, CHUNK: tl.constexpr):
    """The unary bits of each event, all after a 0, and the low bits of its gap."""
    lane = tl.arange(0, CHUNK)
    i = tl.program_id(0).to(tl.int64) * CHUNK + lane
    valid = i < number
    event = _event_at(positions, rest, split, i, valid)
    before = _event_at(positions, rest, split, i - 1, valid & (i > 0))
    subset = event >> 32
    # The index is the low half: within a subset the difference of two events is that of their indices.
    gap = tl.where(before >> 32 == subset, event - before - 1, event & 0xFFFFFFFF).to(tl.int32)
    rice = tl.load(kinds + subset, mask=valid, other=0) & 127
    if tl.program_id(0) == 0:
        tl.store(sizes, 0)
    tl.store(sizes + 1 + i, (gap >> rice) + 1, mask=valid)
    order = i - tl.load(events_from + subset, mask=valid, other=0)
    to = tl.load(fields_from + subset, mask=valid, other=0) + order * rice
    first, last = _neighbours(positions, rest, split, number, subset, i, lane, CHUNK)
    word = to >> 5
    first |= word != (to - rice) >> 5
    last |= word != (to + rice) >> 5
    shifted = (gap & ((1 << rice) - 1)).to(tl.int64) << (to & 31)
    written = valid & (rice > 0)
    add_runs(fields, word, tl.where(written, shifted, 0).to(tl.int32), first & written, last & written)
    # Only the last one that begins in a word reaches into the next.
    high = (shifted >> 32).to(tl.int32)
    tl.atomic_add(fields + word + 1, high, mask=written & (high != 0), sem="relaxed")


@triton.jit(do_not_specialize=["split", "number"])
def ones(positions, rest, split, number, events_from, unary_from, unary_ends, unary, CHUNK: tl.constexpr):
    """The one-bit of each event; `unary_ends` are prefix sums of the bits of each, the first one 0."""
    lane = tl.arange(0, CHUNK)
    i = tl.program_id(0).to(tl.int64) * CHUNK + lane
    valid = i < number
    subset = _event_at(positions, rest, split, i, valid) >> 32
    begin = tl.load(events_from + subset, mask=valid, other=0)
    end = tl.load(unary_ends + i + 1, mask=valid, other=0)
    to = tl.load(unary_from + subset, mask=valid, other=0) + end - tl.load(unary_ends + begin, mask=valid, other=0) - 1
    first, last = _neighbours(positions, rest, split, number, subset, i, lane, CHUNK)
    word = to >> 5
    first |= word != (to - (end - tl.load(unary_ends + i, mask=valid, other=0))) >> 5
    last |= word != (to + (tl.load(unary_ends + i + 2, mask=valid & (i + 1 < number), other=0) - end)) >> 5
    one = tl.where(valid, tl.full([1], 1, tl.int32) << (to & 31).to(tl.int32), 0)
    add_runs(unary, word, one, first & valid, last & valid)
