"""The tables of segments, written and read for all of a batch in one call. `streams` says what the columns are."""

from __future__ import annotations

import numpy as np
import torch

from rillflow.weights.delta.format import HEADER_SIZE, MAX_RICE
from rillflow.weights.delta.gpu.batch import Array, Parcel, Spans
from rillflow.weights.delta.jit import compiled, inlined

TOO_MANY = 2


def write(data: Array, some: Spans, totals: Array, choices: Array, table: Array, width: int) -> None:
    """The heads of a batch's segments and the tables of the coded ones, in the room that `places.pack` left them."""
    total, members, kinds = table.reshape(3, len(some), -1, 2 * width)
    begin = totals[:-1, 6] + np.where(some.start == 0, HEADER_SIZE, 0)
    if not _write(data, begin, totals, choices, some.weights * (width // 8), total, members, kinds, width):
        raise RuntimeError("a table has another size than the device computed")


@compiled
def _write(
    data: Array, begin: Array, totals: Array, choices: Array, raw: Array, total: Array, members: Array, kinds: Array,
    width: int,
) -> bool:  # fmt: skip
    for s in range(len(raw)):
        at = begin[s] + 5
        size = totals[s + 1, 6] - at
        kind = 0 if totals[s, 7] == 0 else (2 if size == raw[s] else 1)
        data[at - 5] = kind
        _put_32(data, at - 4, size)
        if kind != 1:
            continue
        end = _write_table(data, at, choices[s, 0], choices[s, 2], total[s], members[s], kinds[s], width)
        if end != at + totals[s, 5]:
            return False
        _put_32(data, end, (totals[s, 3] + 7) // 8)
    return True


@inlined
def _put_32(data: Array, at: int, number: int) -> None:
    for k in range(4):
        data[at + k] = number >> (8 * k) & 0xFF


@inlined
def _write_table(
    data: Array, at: int, limits: int, last: int, total: Array, members: Array, kinds: Array, width: int
) -> int:
    """Write a segment's table from `at` on; where it ends."""
    data[at] = last
    at += 1
    for c in range(1, last + 1):
        data[at] = 256 - (limits >> (8 * c) & 0xFF)
        at += 1
    for c in range(last + 1):
        for column in range(width + 1):
            left = members[c, column]
            some = 0 < left < total[c, column]
            while left > 0x7F:
                data[at] = left & 0x7F | 0x80
                left >>= 7
                at += 1
            data[at] = left
            at += 1
            if some:
                data[at] = kinds[c, column]
                at += 1
            if column != 1 and members[c, column] == 0:
                break
    return at


class Plans:
    """What the tables of a batch of segments say: of every column of every group, and of every segment. All of it lies
    in a parcel for the device.

    Bits count from the first byte of the batch's data; events, changes and words of bitmaps from 0 over all segments.
    `chunks` are where the chunks (see `chunks`) of segments, columns, groups and groups again begin.
    """

    def __init__(self, segments: int, classes: int, width: int, device: torch.device) -> None:
        groups, self.columns = segments * classes, 2 * width
        columns = groups * self.columns
        self.parcel = Parcel(
            [columns + 1, columns, columns + 1, groups + 1, 4 * segments],
            [columns, columns, segments + 1, columns + 1, groups + 1, groups + 1],
            device,
        )
        self.events_from, self.fields_from, self.words_from, self.changes_from, unary = self.parcel.arrays[:5]
        self.total, self.kinds, *self.chunks = self.parcel.arrays[5:]
        # First bit, one beyond the last, events before, events after.
        self.unary = unary.reshape(segments, 4)

    def unary_fits(self, ones: Array, last: Array) -> bool:
        """Whether the unary streams have the one-bits that the tables say, given how many come before each stream, and
        where the last one of each is, which must be in its last byte: nothing may follow it."""
        begin, end, first, beyond = self.unary.T
        size = np.where(beyond > first, last // 8 + 1, 0)
        return bool(np.all(np.diff(ones) == beyond - first) and np.all(size == (end - begin) // 8))


def read(
    data: Array, begin: Array, size: Array, sizes: Array, last: Array, width: int, device: torch.device
) -> Plans | None:
    """None when the bytes are not those of tables and streams that belong to classes of these sizes.

    A segment of no bytes is one in which nothing changed.
    """
    plans = Plans(sizes.shape[0], sizes.shape[1], width, device)
    good = _read(
        data, begin, size, sizes, last, width, plans.total, plans.kinds, plans.events_from, plans.fields_from,
        plans.words_from, plans.changes_from, plans.unary,
    )  # fmt: skip
    return plans if good else None


@compiled
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


@compiled
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
    return at + 1, members, int(data[at])


@compiled
def _read(
    data: Array, begin: Array, size: Array, sizes: Array, last: Array, width: int, total: Array, kinds: Array,
    events_from: Array, fields_from: Array, words_from: Array, changes_from: Array, unary: Array,
) -> bool:  # fmt: skip
    classes = sizes.shape[1]
    events, words, changes = 0, 0, 0
    for s in range(len(begin)):
        at, end = begin[s] + 1 + last[s], begin[s] + size[s]
        unary[s, 0], unary[s, 1], unary[s, 2] = 0, 0, events
        bits = 0
        for c in range(classes):
            group = s * classes + c
            first = group * 2 * width
            items = sizes[s, c]
            changed = 0
            for column in range(width + 1):
                members, kind = 0, 0
                # Classes that are not used have no items; a group without changes has no further columns.
                if size[s] and c <= last[s] and (column == 0 or items):
                    at, members, kind = _subset(data, at, end, items)
                    if at < 0:
                        return False
                coded = 0
                if 0 < members < items:
                    coded = items - members if kind & 128 else members
                total[first + column] = items
                kinds[first + column] = kind
                events_from[first + column] = events
                words_from[first + column] = words
                fields_from[first + column] = bits
                events += coded
                bits += coded * (kind & 127)
                # Where the changed weights themselves are coded no bitmap is needed.
                if column or kind & 128:
                    words += (items + 31) // 32
                if column == 0:
                    changes_from[group] = changes
                    changes += members
                    changed = members
                    items = members
                elif column == 1:
                    items = changed
                else:
                    # Those of length column - 2, whose low bits come after all subsets.
                    if column > 2:
                        total[first + width + column - 2] = items - members
                    items = members
            # Those of the last subset are of the greatest length.
            total[first + 2 * width - 1] = items
            for length in range(1, width):
                column = first + width + length
                kinds[column], events_from[column], words_from[column], fields_from[column] = 0, events, words, bits
                bits += length * total[column]
        unary[s, 3] = events
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
        fields = (at + stream) * 8
        for column in range(s * classes * 2 * width, (s + 1) * classes * 2 * width):
            fields_from[column] += fields
    events_from[-1], words_from[-1], changes_from[-1] = events, words, changes
    return True


def read_limits(data: Array, begin: Array, size: Array, exponents: int) -> tuple[Array, Array]:
    """Of each segment: limits (see `words.reached`) in two numbers, and the last class; and what it is: 0 damaged, 1
    good, TOO_MANY classes for the kernels."""
    limits, state = np.zeros((len(begin), 3), np.int64), np.zeros(len(begin), np.int8)
    _read_limits(data, begin, size, exponents, limits, state)
    return limits, state


@compiled
def _read_limits(data: Array, begin: Array, size: Array, exponents: int, limits: Array, state: Array) -> None:
    for s in range(len(begin)):
        state[s] = 1
        if not size[s]:
            continue
        last = int(data[begin[s]])
        if 1 + last > size[s]:
            state[s] = 0
            continue
        before = 0
        for c in range(1, last + 1):
            start = int(data[begin[s] + c])
            if start <= before or start >= exponents:
                state[s] = 0
                break
            before = start
            if c < 16:
                limits[s, c // 8] |= (256 - start) << (8 * (c % 8))
        limits[s, 2] = last
        if state[s] and last > 15:
            state[s] = TOO_MANY
