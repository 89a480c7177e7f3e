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
from rillflow.weights.delta.gpu.room import ALIGNED, Piece
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


class Batch(NamedTuple):
    """What is to be read: of each segment, where its bytes begin, how many there are, and the last class. There are so
    many classes for each, and so many weights in all; these have so many bits."""

    begin: Array
    size: Array
    last: Array
    classes: int
    weights: int
    width: int

    @property
    def groups(self) -> int:
        return len(self.begin) * self.classes

    @property
    def most(self) -> int:
        """How many rows there may be."""
        return self.groups * (self.width + 2)

    def room(self) -> int:
        """How many bytes the plans may have."""
        segments, total = len(self.begin), int(self.size.sum())
        # Every event has a bit of its own.
        chunks = total // (4 * WORDS) + 2 * segments + total * 8 // EVENTS + self.most
        chunks += self.weights // EVENTS + self.weights // (32 * WORDS) + 2 * self.groups
        return (4 * segments + _ROW * self.most) * 8 + (segments + 3 * self.groups + chunks) * 4 + 16 * ALIGNED


class Plans:
    """Of each segment, `unary`: first bit and one beyond the last of its unary stream, its first event and one beyond
    its last; `ones_from`: its first chunk of words. Of each group, `changes_from`, `chunks_from`, `first_row`: its
    first change, chunk of changes, and row. And of each kind of chunks, the owner of each.

    They lie `here`, where the host writes them, as they do `there`, on the device: one copy brings all.
    """

    def __init__(self, here: Piece, there: Piece, batch: Batch) -> None:
        self._here, self._there, self._batch = here, there, batch
        self._end = 0
        segments, groups = len(batch.begin), batch.groups
        unary, self.unary = self._take(4 * segments, torch.int64)
        self._unary = unary.reshape(segments, 4)
        self._ones_from, self.ones_from = self._take(segments + 1, torch.int32)
        self._changes_from, self.changes_from = self._take(groups + 1, torch.int32)
        self._chunks_from, self.chunks_from = self._take(groups + 1, torch.int32)
        self._first_row, self.first_row = self._take(groups, torch.int32)
        self.ends = Ends(*[0] * len(Ends._fields))

    def _take(self, number: int, dtype: torch.dtype) -> tuple[Array, Piece]:
        """The next numbers, here and there."""
        begin = self._end
        self._end += -(-number * dtype.itemsize // ALIGNED) * ALIGNED
        return self._here.part(begin, number, dtype).array, self._there.part(begin, number, dtype)

    def read(self, data: Array, sizes: Array) -> bool:
        """False when the bytes are not those of tables and streams that belong to groups of these sizes.

        A segment of no bytes is one in which nothing changed."""
        batch, first, ends = self._batch, self._end, np.zeros(len(Ends._fields), np.int64)
        rows = self._take(batch.most * _ROW, torch.int64)[0].reshape(-1, _ROW)
        good = _read(
            data, batch.begin, batch.size, sizes.reshape(-1, batch.classes), batch.last, batch.width, rows,
            self._unary, self._ones_from, self._changes_from, self._chunks_from, self._first_row, ends,
        )  # fmt: skip
        self.ends, self._end = Ends(*ends.tolist()), first
        # What follows begins behind the rows that are used.
        _, self.rows = self._take(self.ends.rows * _ROW, torch.int64)
        owners = [self._take(number, torch.int32) for number in self.ends[4:]]
        self.owners = [there for _, there in owners]
        if good:
            _own(rows, self.ends.rows, self._ones_from, self._chunks_from, *(here for here, _ in owners))
        return bool(good)

    def send(self) -> None:
        """Let the current stream copy everything."""
        to, source = (piece.part(0, self._end, torch.uint8) for piece in (self._there, self._here))
        to.tensor.copy_(source.tensor, non_blocking=True)

    def unary_fits(self, ones: Array, last: Array) -> bool:
        """Whether the unary streams have as many one-bits as the tables say, given how many each has, and where the
        last one of each is, which must be in its last byte: nothing may follow it."""
        begin, end, first, beyond = self._unary.T
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
