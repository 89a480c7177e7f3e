"""Tables and bit streams of coded segments, decoded by torch into changes: which weight of a class, and by how much.

Rillflow's `kernels.delta.format` documents the bits. The host reads the tables: every subset becomes a row (`Rows`).
The streams of all segments of a batch are decoded at once: events, ranks, signs, lengths, low bits.

Invariant: whatever the bytes are, no index leaves its array, because an index error on a GPU ends the server. Bytes
that do not fit raise DeltaError. Imports only the standard library, numpy and torch: it runs in the server's
environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

_MOST_RICE = 22
_WORD = 4  # bytes of a word of the field streams


class DeltaError(ValueError):
    """A delta that is damaged, or that belongs to other weights."""


def check(right: bool, wrong: str) -> None:
    if not right:
        raise DeltaError(f"a delta cannot be decoded: {wrong}")


# ---------------------------------------------------------------- tables


class Rows:
    """The subsets of all groups of a batch. A group is a class of a segment in which anything changed.

    A subset has: its group; its level (0 changed, 1 negative, 2 + l longer than l); how many items and members it has;
    how many events code it; their Rice parameter and the first bit of their low bits; whether events name non-members
    (`flip`). A group has: its changes, where its class begins among the sorted weights, its segment, and by length the
    first of the low bits of its changes. Bits count from the start of the batch's field streams.
    """

    COLUMNS = ("group", "level", "items", "members", "events", "rice", "field", "flip")

    def __init__(self, width: int) -> None:
        self._width = width
        self.rows: list[tuple[int, ...]] = []
        self.changes: list[int] = []
        self.begins: list[int] = []
        self.segments: list[int] = []
        self.low_bits: list[list[int]] = []

    def read(
        self, data: memoryview, segment: int, sizes: Sequence[int], begin: int, field: int
    ) -> tuple[int, int, int]:
        """Add a segment whose classes have these sizes, the first of them at `begin`. Return where its table ends, how
        many events it has, and where its bits of the field stream end."""
        at, events = len(sizes), 0
        for size in sizes:
            first = len(self.rows)
            at, field = self._read_class(data, at, size, field)
            if len(self.rows) > first:
                events += sum(row[4] for row in self.rows[first:])
                self.begins.append(begin)
                self.segments.append(segment)
            begin += size
        return at, events, field

    def _read_class(self, data: memoryview, at: int, items: int, field: int) -> tuple[int, int]:
        group, lengths = len(self.changes), []
        for level in range(self._width + 1):
            members, at = _varint(data, at)
            check(members <= items, "a subset has more members than items")
            if level == 0 and not members:
                return at, field
            events, kind = 0, 0
            if 0 < members < items:
                kind, at = data[at], at + 1
                events = items - members if kind & 0x80 else members
            rice = kind & 0x7F
            check(rice <= _MOST_RICE, "a Rice parameter is too large")
            flip = kind >> 7 or int(members == items)
            self.rows.append((group, level, items, members, events, rice, field, flip))
            field += events * rice
            if level > 1:
                lengths.append(items - members)
            if level != 1:
                items = members
            if not items:
                break
        else:  # the longest changes: the table does not say that none is longer
            self.rows.append((group, self._width + 1, items, 0, 0, 0, field, 0))
            lengths.append(items)
        self.changes.append(self.rows[-len(lengths) - 2][3])
        self.low_bits.append([])
        for length in range(self._width):
            self.low_bits[-1].append(field)
            field += length * (lengths[length] if length < len(lengths) else 0)
        return at, field


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DeltaError("a delta cannot be decoded: a number is too long")


# ---------------------------------------------------------------- streams


class Streams:
    """The coded bytes of a batch. `bounds` has for each segment the first bit of its unary stream and the one behind
    it, and its first event."""

    def __init__(
        self, segments: Sequence[memoryview], sizes: Sequence[Sequence[int]], width: int, device: torch.device
    ) -> None:
        """`sizes` has the number of weights in each class of each segment; weights have `width` bits."""
        self.rows = Rows(width)
        self.bounds: list[tuple[int, int, int]] = []
        unary: list[memoryview] = []
        fields: list[memoryview] = []
        begin = bit = self.events = field_bytes = 0
        try:
            for number, (data, of_classes) in enumerate(zip(segments, sizes, strict=True)):
                at, events, end = self.rows.read(data, number, of_classes, begin, 8 * field_bytes)
                size = int.from_bytes(data[at : at + 4], "little")
                check(at + 4 + size <= len(data), "a segment ends too early")
                unary.append(data[at + 4 : at + 4 + size])
                fields.append(data[at + 4 + size :])
                check(-(-end // 8) - field_bytes == len(fields[-1]), "a field stream has another size than its table")
                check(bool(events) == bool(size), "a unary stream has another size than its table")
                self.bounds.append((bit, bit + 8 * size, self.events))
                begin, bit, self.events = begin + sum(of_classes), bit + 8 * size, self.events + events
                field_bytes += len(fields[-1])
        except IndexError:
            raise DeltaError("a delta cannot be decoded: a table ends too early") from None
        self.unary = torch.from_numpy(np.frombuffer(b"".join(unary), np.uint8).copy()).to(device)
        padding = bytes(2 * _WORD + -field_bytes % _WORD)  # a window of two words is read at any bit
        words = np.frombuffer(b"".join([*fields, padding]), np.int32).copy()
        self.words = torch.from_numpy(words).to(device)

    def low(self, at: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
        """Return numbers of `width` bits (at most 31) of the field streams, each from the bit `at` on."""
        word = at >> 5
        window = (self.words[word + 1].long() << 32) | (self.words[word].long() & 0xFFFFFFFF)
        return (window >> (at & 31)) & ((torch.ones_like(width) << width) - 1)

    def ones(self) -> torch.Tensor:
        """Return the place of each event's one-bit in all unary streams."""
        shift = torch.arange(8, dtype=torch.uint8, device=self.unary.device)
        place_E = ((self.unary[:, None] >> shift) & 1).view(-1).nonzero()[:, 0]
        check(len(place_E) == self.events, "the unary streams have another number of events than the tables")
        return place_E


class Changes(NamedTuple):
    """The changes of a batch: the group of each, its rank in the class, its difference in units in the last place."""

    group_K: torch.Tensor
    rank_K: torch.Tensor
    change_K: torch.Tensor


def changes_of(streams: Streams) -> Changes:
    """Return the changes of a batch, group by group, in the order of their ranks."""
    rows, device = streams.rows, streams.words.device
    table_RF = np.array(rows.rows)
    row = dict(zip(Rows.COLUMNS, torch.from_numpy(table_RF).to(device).unbind(1), strict=True))
    events = _Events(streams, row)
    ordered = _by_level(table_RF)
    member_T = _members(events, row, ordered, device)
    count_G = torch.tensor(rows.changes, device=device)
    total = sum(rows.changes)
    group_K = torch.repeat_interleave(torch.arange(len(rows.changes), device=device), count_G, output_size=total)
    rank_K = _ranks(events, row, rows, total)
    low_GL = torch.tensor(rows.low_bits, device=device)
    length_K, low_K = torch.zeros_like(group_K), torch.zeros_like(group_K)
    active_A = torch.arange(total, device=device)
    negative_K = member_T[:total]
    begin = total
    for length, (count, before_A) in enumerate(ordered.lengths(device)):
        longer_A = member_T[begin : begin + count]
        begin += count
        ends_A = ~longer_A
        if length:
            ended_A = torch.cat([ends_A.new_zeros(1, dtype=torch.int64), ends_A.cumsum(0)])
            order_A = ended_A[:-1] - ended_A[before_A]
            low_A = low_GL[group_K[active_A], length] + order_A * length
            here = active_A[ends_A]
            length_K[here], low_K[here] = length, low_A[ends_A]
        active_A = active_A[longer_A]
    size_K = (torch.ones_like(length_K) << length_K) | streams.low(low_K, length_K)
    return Changes(group_K, rank_K, torch.where(negative_K, -size_K, size_K))


class _Events:
    """All events of a batch: the row of each, its order there, and the item that it names."""

    def __init__(self, streams: Streams, row: dict[str, torch.Tensor]) -> None:
        count_R, device = row["events"], row["events"].device
        first_R = count_R.cumsum(0) - count_R
        rows = torch.arange(len(count_R), device=device)
        self.row_E = torch.repeat_interleave(rows, count_R, output_size=streams.events)
        self.order_E = torch.arange(streams.events, device=device) - first_R[self.row_E]
        place_E = streams.ones()
        before_E = torch.cat([place_E.new_zeros(1), place_E])[:-1]
        fault = _out_of_bounds(streams, place_E)
        starts = [(bit - 1, first) for bit, end, first in streams.bounds if end > bit]
        if starts:
            bit_S, first_S = torch.tensor(starts, device=device).unbind(1)
            before_E[first_S] = bit_S
        rice_E = row["rice"][self.row_E]
        low_E = streams.low(row["field"][self.row_E] + self.order_E * rice_E, rice_E)
        gap_E = ((place_E - before_E - 1) << rice_E) | low_E
        sum_E = torch.cat([gap_E.new_zeros(1), (gap_E + 1).cumsum(0)])
        self.item_E = sum_E[1:] - 1 - sum_E[first_R[self.row_E]]
        fault = fault | (self.item_E >= row["items"][self.row_E]).any()
        check(not bool(fault), "an event names an item that does not exist")


def _out_of_bounds(streams: Streams, place_E: torch.Tensor) -> torch.Tensor:
    """Return whether an event lies in the stream of another segment, or a stream goes on behind its last event."""
    bounds = [*streams.bounds, (0, 0, streams.events)]
    rows = [(begin, end, first, beyond - 1) for (begin, end, first), (_, _, beyond) in pairwise(bounds) if end > begin]
    if not rows:
        return torch.zeros((), dtype=torch.bool, device=place_E.device)
    begin_S, end_S, first_S, last_S = torch.tensor(rows, device=place_E.device).unbind(1)
    return ((place_E[first_S] < begin_S) | (place_E[last_S] >= end_S) | (place_E[last_S] < end_S - 8)).any()


class _Ordered(NamedTuple):
    """The rows of all levels but the first, level by level: their numbers, items and levels."""

    rows: Any
    items: Any
    level: Any

    def lengths(self, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each length, how many changes are at least as long, and for each of them, how many such changes
        come before those of its group."""
        for level in range(2, int(self.level.max()) + 1):
            items_R = torch.from_numpy(self.items[self.level == level]).to(device)
            total = int(self.items[self.level == level].sum())
            yield total, torch.repeat_interleave(items_R.cumsum(0) - items_R, items_R, output_size=total)


def _by_level(table_RF: Any) -> _Ordered:
    level_R, group_R = table_RF[:, 1], table_RF[:, 0]
    order = np.lexsort((group_R, level_R))
    order = order[level_R[order] > 0]
    return _Ordered(order, table_RF[order, 2], level_R[order])


def _members(events: _Events, row: dict[str, torch.Tensor], ordered: _Ordered, device: torch.device) -> torch.Tensor:
    """Return which items are members, of all subsets but those of changed weights, level by level."""
    total = int(ordered.items.sum())
    rows = torch.from_numpy(ordered.rows).to(device)
    items_R = torch.from_numpy(ordered.items).to(device)
    begin_R = torch.full_like(row["items"], total)
    begin_R[rows] = items_R.cumsum(0) - items_R
    # Events of changed weights go to a place behind all others.
    at_E = torch.where(row["level"][events.row_E] > 0, begin_R[events.row_E] + events.item_E, total)
    named_T = torch.zeros(total + 1, dtype=torch.bool, device=device)
    named_T[at_E] = True
    flip_T = torch.repeat_interleave(row["flip"][rows] != 0, items_R, output_size=total)
    return named_T[:-1] ^ flip_T


def _ranks(events: _Events, row: dict[str, torch.Tensor], rows: Rows, total: int) -> torch.Tensor:
    """Return the rank of each changed weight in its class: the items that events name, or all others."""
    device = row["items"].device
    first_G = torch.tensor([0, *rows.changes], device=device).cumsum(0)[:-1]
    changed_E = row["level"][events.row_E] == 0
    flip_E = row["flip"][events.row_E] != 0
    rank_K = torch.zeros(total + 1, dtype=torch.int64, device=device)
    to_E = first_G[row["group"][events.row_E]] + events.order_E
    rank_K[torch.where(changed_E & ~flip_E, to_E, total)] = events.item_E
    flipped = [(number, one[2], one[3]) for number, one in enumerate(rows.rows) if one[1] == 0 and one[7]]
    if flipped:
        number_F, items_F, members_F = torch.tensor(flipped, device=device).unbind(1)
        items, members = sum(one[1] for one in flipped), sum(one[2] for one in flipped)
        begin_F = items_F.cumsum(0) - items_F
        begin_R = torch.full_like(row["items"], items)
        begin_R[number_F] = begin_F
        rest_I = torch.ones(items + 1, dtype=torch.bool, device=device)
        rest_I[torch.where(changed_E & flip_E, begin_R[events.row_E] + events.item_E, items)] = False
        item_M = rest_I[:-1].nonzero()[:, 0] - torch.repeat_interleave(begin_F, members_F, output_size=members)
        before_F = first_G[row["group"][number_F]] - (members_F.cumsum(0) - members_F)
        to_M = torch.repeat_interleave(before_F, members_F, output_size=members)
        rank_K[to_M + torch.arange(members, device=device)] = item_M
    return rank_K[:-1]
