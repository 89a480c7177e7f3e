"""What the tables of a batch of segments say, for kernels: a row of every subset that has members, and no others.

A row is eight 64-bit numbers: the first event of the subset and how many events it has; the first bit of the low bits
of its gaps; items; its kind, which is that of the table and flags; the first word of its bitmap; two more numbers; the
first chunk of its events. A group in which anything changed has rows of its subsets in their order: changed, negative,
longer than 0, 1, …, to one without members, which is also there where the table ends before it.

If the changed weights themselves are coded they have no bitmap, but the first change of the group instead of its first
word. If the others are, the first of the two more numbers is the first chunk of their bitmap. Of `negative` it is the
first change of the group, and of `longer than l` the first bit of the low bits of changes of length l.

Bits count from the first byte of the batch's data; events, changes and words of bitmaps from 0 over all segments. A
chunk is a run of at most so many events, changes or words of one owner each, as programs of kernels take them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rillflow.weights.delta.format import MAX_RICE
from rillflow.weights.delta.gpu.batch import Array
from rillflow.weights.delta.gpu.expand import CODED, FIRST, RANKS
from rillflow.weights.delta.gpu.room import Piece, Room
from rillflow.weights.delta.jit import compiled, inlined

# Events and changes of a chunk, and words of one.
EVENTS, WORDS = 1024, 256
_ROW = 8
# For the host: of rows of lengths, and of rows of changed weights where not these are coded.
_LEVEL, _OTHERS = 1 << 16, 1 << 17
_CODED, _FIRST, _RANKS = CODED.value, FIRST.value, RANKS.value


class Ends(NamedTuple):
    """How many of each there are. Chunks are of the words of unary streams, of events, of the bitmaps of groups whose
    others are coded, and of changes."""

    rows: int
    events: int
    words: int
    changes: int
    of_ones: int
    of_events: int
    of_others: int
    of_changes: int


class Sent(NamedTuple):
    """The arrays of `Plans` on the device, and who owns each chunk."""

    unary: Piece
    ones_from: Piece
    changes_from: Piece
    chunks_from: Piece
    first_row: Piece
    rows: Piece
    owners: list[Piece]


class Plans:
    """Of each segment, `unary`: first bit and one beyond the last of its unary stream, its first event and one beyond
    its last; `ones_from`: its first chunk of words. Of each group, `changes_from`, `chunks_from`, `first_row`: its
    first change, chunk of changes, and row."""

    def __init__(self, sizes: Array, begin: Array, size: Array, last: Array, width: int, device: torch.device) -> None:
        segments, classes = sizes.shape
        groups = segments * classes
        most = groups * (width + 2)
        total, weights = int(size.sum()), int(sizes.sum())
        # No more chunks than this: every event has a bit of its own.
        chunks = total // (4 * WORDS) + 2 * segments + total * 8 // EVENTS + most + weights // EVENTS + groups
        chunks += weights // (32 * WORDS) + groups
        self._arguments = begin, size, sizes, last, width
        host = Room(device, host=True)
        self._fixed = (
            host.longs(4 * segments), host.ints(segments + 1), host.ints(groups + 1), host.ints(groups + 1),
            host.ints(groups),
        )  # fmt: skip
        self._rows, self._room = host.longs(most * _ROW), host
        host.ints(chunks + 4 * 64)
        host.make()
        unary, self.ones_from, self.changes_from, self.chunks_from, self.first_row = (
            piece.array for piece in self._fixed
        )
        self.unary, self.rows = unary.reshape(segments, 4), self._rows.array.reshape(most, _ROW)
        self.ends = Ends(*[0] * len(Ends._fields))

    def read(self, data: Array) -> bool:
        """False when the bytes are not those of tables and streams that belong to classes of these sizes.

        A segment of no bytes is one in which nothing changed."""
        ends = np.zeros(len(Ends._fields), np.int64)
        good = _read(
            data, *self._arguments, self.rows, self.unary, self.ones_from, self.changes_from, self.chunks_from,
            self.first_row, ends,
        )  # fmt: skip
        self.ends = Ends(*ends.tolist())
        return bool(good)

    def take(self, room: Room) -> Sent:
        """Room on the device for all that is sent."""
        unary, ones_from, changes_from, chunks_from, first_row = self._fixed
        return Sent(
            room.longs(unary.number), room.ints(ones_from.number), room.ints(changes_from.number),
            room.ints(chunks_from.number), room.ints(first_row.number), room.longs(self.ends.rows * _ROW),
            [room.ints(number) for number in self.ends[4:]],
        )  # fmt: skip

    def send(self, sent: Sent) -> None:
        """Copy everything, by one transfer: the pieces lie here as they do there."""
        first = self._rows.begin + -(-self.ends.rows * _ROW * 8 // 256) * 256
        owners = []
        for piece in sent.owners:
            owners.append(self._room.data[first : first + 4 * piece.number].view(np.int32))
            first += -(-4 * piece.number // 256) * 256
        _own(self.rows, self.ends.rows, self.ones_from, self.chunks_from, *owners)
        begin = sent.unary.begin
        sent.unary.room.memory[begin : begin + first].copy_(self._room.memory[:first], non_blocking=True)

    def unary_fits(self, ones: Array, last: Array) -> bool:
        """Whether the unary streams have as many one-bits as the tables say, given how many each has, and where the
        last one of each is, which must be in its last byte: nothing may follow it."""
        begin, end, first, beyond = self.unary.T
        size = np.where(beyond > first, last // 8 + 1, 0)
        return bool(np.all(ones == beyond - first) and np.all(size == (end - begin) // 8))


@inlined
def _number(data: Array, at: int, end: int) -> tuple[int, int]:
    """A varint and where it ends; -1 where there is none."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= end:
            return -1, at
        byte = int(data[at])
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return -1, at


@inlined
def _subset(data: Array, at: int, end: int, items: int) -> tuple[int, int, int]:
    """Where a subset's numbers end, or -1; how many members it has; its kind, with 128 where all items are members."""
    members, at = _number(data, at, end)
    if members < 0 or members > items:
        return -1, 0, 0
    if members == items:
        return at, members, 128 if items else 0
    if not members:
        return at, 0, 0
    if at >= end or int(data[at]) & 127 > MAX_RICE:
        return -1, 0, 0
    return at + 1, members, int(data[at]) | _CODED


@inlined
def _put(
    rows: Array, row: int, kind: int, items: int, members: int, events: int, first_event: int, bits: int, words: int,
    more: int, chunk: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Write a row. Where the next one's events, low bits, words and chunks begin."""
    coded = 0
    if kind & _CODED:
        coded = items - members if kind & 128 else members
        if events == first_event:
            kind |= _FIRST
    rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = events, coded, bits, items
    rows[row, 4], rows[row, 5], rows[row, 6], rows[row, 7] = kind, words, more, chunk
    if kind & _CODED and not kind & _RANKS:
        words += (items + 31) >> 5
    return events + coded, bits + coded * (kind & 127), words, chunk + ((coded + EVENTS - 1) // EVENTS)


@inlined
def _read_group(
    data: Array, at: int, end: int, items: int, first_event: int, width: int, rows: Array, changes: int, others: int,
    row: int, events: int, bits: int, words: int, chunk: int,
) -> tuple[int, int, int, int, int, int, int]:  # fmt: skip
    """The rows of a group whose part of the table begins at `at`: where that ends, or -1 where it is none, how many
    weights changed, and the last five arguments behind the group."""
    at, changed, kind = _subset(data, at, end, items)
    if at < 0 or not changed:
        return at, 0, row, events, bits, words, chunk
    to = words if kind & 128 else changes
    kind |= _OTHERS if kind & 128 else _RANKS
    events, bits, end_of_words, chunk = _put(
        rows, row, kind, items, changed, events, first_event, bits, to, others, chunk
    )
    words = end_of_words if kind & 128 else words
    at, members, kind = _subset(data, at, end, changed)
    if at < 0:
        return at, 0, row, events, bits, words, chunk
    events, bits, words, chunk = _put(
        rows, row + 1, kind, changed, members, events, first_event, bits, words, changes, chunk
    )
    row += 2
    first, items, level = row, changed, 0
    while items:
        members, kind = 0, 0
        if level < width - 1:
            at, members, kind = _subset(data, at, end, items)
            if at < 0:
                return at, 0, row, events, bits, words, chunk
        events, bits, words, chunk = _put(
            rows, row, kind | _LEVEL, items, members, events, first_event, bits, words, items - members, chunk
        )
        items = members
        level += 1
        row += 1
    # The low bits of changes come behind all gaps: until here, how many changes have the length of each row.
    for level in range(row - first):
        exact = rows[first + level, 6]
        rows[first + level, 6] = bits
        bits += level * exact
    return at, changed, row, events, bits, words, chunk


@compiled
def _read(
    data: Array, begin: Array, size: Array, sizes: Array, last: Array, width: int, rows: Array, unary: Array,
    ones_from: Array, changes_from: Array, chunks_from: Array, first_row: Array, ends: Array,
) -> bool:  # fmt: skip
    """`ends` get what `Ends` says."""
    classes = sizes.shape[1]
    row, events, words, changes, of_ones, of_events, of_others, of_changes = 0, 0, 0, 0, 0, 0, 0, 0
    for s in range(len(begin)):
        at, end = begin[s] + 1 + last[s], begin[s] + size[s]
        first, first_event, bits = row, events, 0
        for c in range(classes):
            group = s * classes + c
            changes_from[group], chunks_from[group], first_row[group] = changes, of_changes, row
            if size[s] and c <= last[s]:
                here, items = row, int(sizes[s, c])
                at, changed, row, events, bits, words, of_events = _read_group(
                    data, at, end, items, first_event, width, rows, changes, of_others, row, events, bits, words,
                    of_events,
                )  # fmt: skip
                if at < 0:
                    return False
                changes += changed
                of_changes += (changed + EVENTS - 1) // EVENTS
                if changed and rows[here, 4] & _OTHERS:
                    of_others += (((items + 31) >> 5) + WORDS - 1) // WORDS
        unary[s, 0], unary[s, 1], unary[s, 2], unary[s, 3] = 0, 0, first_event, events
        ones_from[s] = of_ones
        if not size[s]:
            continue
        if at + 4 > end:
            return False
        stream = int(data[at]) | int(data[at + 1]) << 8 | int(data[at + 2]) << 16
        stream |= int(data[at + 3]) << 24
        at += 4
        if at + stream + (bits + 7) // 8 != end or stream >= 1 << 28:
            return False
        unary[s, 0], unary[s, 1] = at * 8, (at + stream) * 8
        of_ones += ((((at + stream) * 8 + 31) >> 5) - (at * 8 >> 5) + WORDS - 1) // WORDS
        _move(rows, first, row, (at + stream) * 8)
    ones_from[-1], changes_from[-1], chunks_from[-1] = of_ones, changes, of_changes
    ends[:4] = row, events, words, changes
    ends[4:] = of_ones, of_events, of_others, of_changes
    return True


@inlined
def _move(rows: Array, first: int, beyond: int, bits: int) -> None:
    """Count the bits of rows from so many before."""
    for row in range(first, beyond):
        rows[row, 2] += bits
        if rows[row, 4] & _LEVEL:
            rows[row, 6] += bits


@compiled
def _own(
    rows: Array, number: int, ones_from: Array, chunks_from: Array, of_ones: Array, of_events: Array, of_others: Array,
    of_changes: Array,
) -> None:  # fmt: skip
    """Write the owner of each chunk: a segment, a row, a row, a group."""
    _own_runs(ones_from, of_ones)
    _own_runs(chunks_from, of_changes)
    at, there = 0, 0
    for row in range(number):
        for _ in range(0, rows[row, 1], EVENTS):
            of_events[at] = row
            at += 1
        if rows[row, 4] & _OTHERS:
            for _ in range(0, (rows[row, 3] + 31) // 32, WORDS):
                of_others[there] = row
                there += 1


@inlined
def _own_runs(starts: Array, owner: Array) -> None:
    for number in range(len(starts) - 1):
        for chunk in range(starts[number], starts[number + 1]):
            owner[chunk] = number
