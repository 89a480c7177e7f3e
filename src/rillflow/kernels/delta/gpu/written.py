"""A batch of segments on its way from weights to bit streams. What is found stays on the device until the end."""

from __future__ import annotations

import torch

from rillflow.kernels.delta.gpu import compare, places, records, streams
from rillflow.kernels.delta.gpu.batch import BLOCK, Landing, Rows, Shape, clear, land, own
from rillflow.kernels.delta.gpu.room import Piece, Room, kernel

CLASSES = 8
# `_LISTED` must not be less than the threads of a program: a second thread with the same item would read it too late.
_LISTED, _SORTED, _CHUNK, _MANY, _CLEARED = 128, 128, 1024, 1024, 8192
# Of the kernel that reads all weights: so few registers that eight programs share a multiprocessor, without spills.
_COMPARE = {"maxnreg": 64, "num_warps": 4}
# Of kernels that have many numbers for each event or change: four of these a thread, so that registers are not short.
_WARPS = 8
_PARTS, _BYTES = 16, 2048


class Batch:
    """Three steps, each of which gives the numbers that the next one is asked for."""

    def __init__(self, rows: Rows, choices: Piece, shape: Shape, device: torch.device) -> None:
        self._rows, self._choices, self._shape, self._device = rows, choices, shape, device
        self._segments, self._columns = len(rows.spans), 2 * shape.WIDTH
        self._groups, self._sizes = self._segments * CLASSES, rows.count * CLASSES

    def _landing(self, *pieces: Piece) -> Landing:
        return Landing(*pieces, cuda=self._device.type == "cuda")

    def compare(self, limit: int, *, known: bool) -> Landing:
        """Records of what changed. Lands how many there are and, good only if that is not more than `limit`, the number
        of changes, of coded positions, of chunks of changes."""
        rows, shape, host, room = self._rows, self._shape, Room(self._device, host=True), Room(self._device)
        ends, segments = host.longs(4), (rows.table, rows.owner)
        host.make()
        # Behind the totals is the number of records so far.
        self._totals = room.longs((self._segments + 2) * 8)
        self._group_sizes, self._modes, self._changes_from, self._chunks_from = (
            room.ints(self._groups + 1) for _ in range(4)
        )
        self._positions_from = room.longs(self._groups + 1)
        room.make()
        room = Room(self._device)
        self._sums = room.ints(2 * self._sizes + 1)
        self._records, before = room.numbers(limit, shape.WIDTH), room.longs(2 * limit)
        room.make()
        clear(self._totals, _MANY)
        cursor = self._totals.after((self._segments + 1) * 8)
        kernel(
            records.compare, WORDS=BLOCK, CHUNK=_LISTED, CLASSES=CLASSES, **_COMPARE, **shape.all
        )(
            (rows.count,), *segments, self._choices, cursor, limit, self._records, before, rows.begins, rows.records,
            self._sums, self._sizes, self._totals,
        )  # fmt: skip
        if not known:
            kernel(compare.total, WORDS=BLOCK, LANES=shape.LANES)((rows.count,), *segments, self._totals)
        self._sums.tensor.cumsum_(0)
        kernel(places.group, CLASSES=CLASSES, CHUNK=_CHUNK, MANY=_MANY, num_warps=8)(
            (1,), rows.table, self._choices, self._sums, self._groups, self._sizes, self._group_sizes,
            self._changes_from, self._modes, self._positions_from, self._chunks_from, cursor, ends,
        )  # fmt: skip
        return self._landing(ends)

    def unchanged(self) -> Landing:
        """Lands the totals alone, of a batch in which nothing changed."""
        host = Room(self._device, host=True)
        totals = host.longs((self._segments + 1) * 8)
        host.make()
        land(self._totals, totals)
        return self._landing(totals)

    def plan(self, changes: int, positions: int, chunks: int) -> Landing:
        """The numbers of the tables. Lands the number of further events, and at most the words of both streams and the
        bytes of all segments."""
        rows, shape, host, room = self._rows, self._shape, Room(self._device, host=True), Room(self._device)
        ends, columns = host.longs(4), self._groups * self._columns
        host.make()
        ordered, self._positions = room.ints(changes), room.longs(positions)
        owner, self._counts = room.ints(chunks), room.ints((shape.WIDTH + 1) * chunks + 1)
        self._table, self._coded, bits = room.ints(3 * columns), room.ints(columns), room.ints(columns)
        self._fields_from, self._events_from = room.longs(columns), room.longs(columns)
        room.make()
        kernel(compare.sort, CLASSES=CLASSES, CHUNK=_SORTED, WIDTH=shape.WIDTH, num_warps=1)(
            (rows.count,), rows.table, rows.owner, self._records, rows.begins, rows.records, self._sums, self._sizes,
            self._modes, self._positions_from, ordered, self._positions,
        )  # fmt: skip
        del self._records, self._sums
        own(self._chunks_from, self._groups, owner)
        self._chunks, self._chunk = chunks, (owner, self._chunks_from, self._changes_from, ordered)
        count = kernel(streams.count, CHUNK=_CHUNK, WIDTH=shape.WIDTH)
        count((chunks,), *self._chunk, self._counts, chunks)
        self._counts.tensor.cumsum_(0)
        self._kinds = self._table.after(2 * columns)
        kernel(streams.plan, CLASSES=CLASSES, WIDTH=shape.WIDTH)(
            (self._groups,), self._choices, self._group_sizes, self._changes_from, self._chunks_from, self._modes,
            self._counts, chunks, self._table, self._table.after(columns), self._kinds, self._coded, bits, self._totals,
        )  # fmt: skip
        kernel(places.place_events, CLASSES=CLASSES, COLUMNS=self._columns, MANY=_MANY)(
            (self._segments + 1,), rows.table, self._totals, self._segments, bits, self._coded, self._positions_from,
            self._fields_from, self._events_from, ends,
        )  # fmt: skip
        return self._landing(ends)

    def write(self, rest_events: int, fields_words: int, unary_words: int, size: int) -> Landing:
        """Both streams. Lands totals (see `places`) and choices of each segment; the columns of the tables (items,
        members, kinds); the bytes of all segments in a row, with room for headers, heads and tables."""
        split, shape, room = self._positions.number, self._shape, Room(self._device)
        number = split + rest_events
        words, rest, sums = room.ints(fields_words + unary_words + 1), room.longs(rest_events), room.ints(number + 1)
        unary_from, data = room.longs(self._events_from.number), room.bytes(size)
        room.make()
        clear(words, _CLEARED)
        kernel(streams.emit, CHUNK=_CHUNK, WIDTH=shape.WIDTH)(
            (self._chunks,), *self._chunk, self._counts, self._chunks, self._kinds, self._coded, self._events_from,
            self._fields_from, rest, words, split,
        )  # fmt: skip
        events, grid = (self._positions, rest, split, number), (max(-(-number // _CHUNK), 1),)
        gaps = kernel(streams.gaps, CHUNK=_CHUNK, num_warps=_WARPS)
        gaps(grid, *events, self._kinds, self._events_from, self._fields_from, sums, words)
        sums.tensor.cumsum_(0)
        constants = {"CLASSES": CLASSES, "COLUMNS": self._columns, "BYTES": shape.WIDTH // 8}
        table, grid_of_segments = self._rows.table, (self._segments + 1,)
        kernel(places.place_streams, MANY=_MANY, **constants)(
            grid_of_segments, table, self._totals, self._segments, self._changes_from, self._positions_from,
            self._events_from, self._coded, sums, fields_words, unary_from,
        )  # fmt: skip
        ones = kernel(streams.ones, CHUNK=_CHUNK, num_warps=_WARPS)
        ones(grid, *events, self._events_from, unary_from, sums, words)
        kernel(places.pack, PARTS=_PARTS, MANY=_BYTES, **constants)(
            (self._segments, _PARTS), table, self._totals, self._fields_from, unary_from, words, data
        )
        return self._land(data)

    def _land(self, data: Piece) -> Landing:
        host = Room(self._device, host=True)
        totals, choices = host.longs((self._segments + 1) * 8), host.longs(self._segments * 4)
        table, here = host.ints(self._table.number), host.bytes(data.number)
        host.make()
        land(self._totals, totals)
        land(self._choices, choices)
        land(self._table, table, 2 * _MANY)
        here.tensor.copy_(data.tensor, non_blocking=True)
        return self._landing(totals, choices, table, here)
