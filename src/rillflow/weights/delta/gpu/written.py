"""A batch of segments on its way from weights to bit streams. What is found stays on the device until the end."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from rillflow.weights.delta.gpu import compare, places, records, streams
from rillflow.weights.delta.gpu.batch import BLOCK, Array, Landing, Rows, Shape, owners

CLASSES = 8
# `_LISTED` must not be less than the threads of a program: a second thread with the same item would read it too late.
_LISTED, _SORTED, _CHUNK, _MANY = 128, 128, 1024, 1024
# Of the kernel that reads all weights: so few that eight programs share a multiprocessor, without spills.
_REGISTERS = 64
# Of kernels that have many numbers for each event or change: four of these a thread, so that registers are not short.
_WARPS = 8
_PARTS, _BYTES = 16, 2048


class Landed(NamedTuple):
    """What the host needs: totals (see `places`) and choices of each segment; the columns of the tables (items,
    members, kinds); the bytes of all segments in a row, with room for headers, heads and tables."""

    totals: Array
    choices: Array
    table: Array
    data: Array


class Batch:
    """Three steps, each of which gives the numbers that the next one is asked for."""

    def __init__(self, rows: Rows, choices: torch.Tensor, shape: Shape) -> None:
        self._rows, self._choices, self._shape, self._device = rows, choices, shape, choices.device
        self._segments, self._columns = len(rows.spans), 2 * shape.WIDTH
        self._groups, self._sizes = self._segments * CLASSES, rows.count * CLASSES
        self._ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        self._longs = partial(torch.empty, dtype=torch.int64, device=self._device)
        self._owner = rows.owner()
        self.totals = torch.zeros((self._segments + 1, 8), dtype=torch.int64, device=self._device)

    def compare(self, room: int, *, known: bool) -> Landing:
        """Records of what changed. Lands how many there are and, good only if that is not more than `room`, the number
        of changes, of coded positions, of chunks of changes."""
        rows, shape, segments = self._rows, self._shape, (self._rows.on_device, self._owner)
        sums, self._emitted = self._ints(2 * self._sizes + 1), self._ints(rows.count)
        self._begins = self._longs(rows.count)
        self._records, before = (self._ints if shape.WIDTH == 16 else self._longs)(room), self._longs(2 * room)
        ends = torch.zeros(4, dtype=torch.int64, device=self._device)
        records.compare[(rows.count,)](
            *segments, self._choices, ends, room, self._records, before, self._begins, self._emitted, sums,
            self._sizes, self.totals, WORDS=BLOCK, CHUNK=_LISTED, CLASSES=CLASSES, maxnreg=_REGISTERS, **shape.all,
        )  # fmt: skip
        if not known:
            compare.total[(rows.count,)](*segments, self.totals, WORDS=BLOCK, LANES=shape.LANES)
        self._sums = sums.cumsum_(0)
        self._group_sizes, self._modes, self._changes_from, self._chunks_from = self._ints(
            (4, self._groups + 1)
        ).unbind()
        self._positions_from = self._longs(self._groups + 1)
        places.group[(1,)](
            rows.on_device, self._choices, self._sums, self._groups, self._sizes, self._group_sizes,
            self._changes_from, self._modes, self._positions_from, self._chunks_from, ends[1:], CLASSES=CLASSES,
            CHUNK=_CHUNK, MANY=_MANY, num_warps=8,
        )  # fmt: skip
        return Landing(ends)

    def plan(self, changes: int, positions: int, chunks: int) -> Landing:
        """The numbers of the tables. Lands the number of further events, and at most the words of both streams and the
        bytes of all segments."""
        rows, shape = self._rows, self._shape
        ordered, self._positions = self._ints(changes), self._longs(positions)
        compare.sort[(rows.count,)](
            rows.on_device, self._owner, self._records, self._begins, self._emitted, self._sums, self._sizes,
            self._modes, self._positions_from, ordered, self._positions, CLASSES=CLASSES, CHUNK=_SORTED,
            WIDTH=shape.WIDTH, num_warps=1,
        )  # fmt: skip
        del self._records, self._begins, self._emitted, self._sums
        owner = owners(self._chunks_from, self._groups, chunks, FIRST=0, LAST=1, STRIDE=1)
        self._chunks, self._chunk = chunks, (owner, self._chunks_from, self._changes_from, ordered)
        counts = self._ints((shape.WIDTH + 1) * chunks + 1)
        streams.count[(chunks,)](*self._chunk, counts, chunks, CHUNK=_CHUNK, WIDTH=shape.WIDTH)
        self._counts = counts.cumsum_(0)
        table = self._ints((5, self._groups * self._columns))
        self._table, (_, _, self._kinds, self._coded, bits) = table[:3], table.unbind()
        streams.plan[(self._groups,)](
            self._choices, self._group_sizes, self._changes_from, self._chunks_from, self._modes, self._counts, chunks,
            *table.unbind(), self.totals, CLASSES=CLASSES, WIDTH=shape.WIDTH,
        )  # fmt: skip
        self._fields_from, self._events_from = self._longs((2, self._groups * self._columns)).unbind()
        ends = self._longs(4)
        places.place_events[(self._segments + 1,)](
            rows.on_device, self.totals, self._segments, bits, self._coded, self._positions_from, self._fields_from,
            self._events_from, ends, CLASSES=CLASSES, COLUMNS=self._columns, MANY=_MANY,
        )  # fmt: skip
        return Landing(ends)

    def write(self, rest_events: int, fields_words: int, unary_words: int, size: int) -> Landing:
        """Both streams. Lands the fields of `Landed`."""
        words = torch.zeros(fields_words + unary_words + 1, dtype=torch.int32, device=self._device)
        rest, split = self._longs(rest_events), len(self._positions)
        streams.emit[(self._chunks,)](
            *self._chunk, self._counts, self._chunks, self._kinds, self._coded, self._events_from, self._fields_from,
            rest, words, split, CHUNK=_CHUNK, WIDTH=self._shape.WIDTH,
        )  # fmt: skip
        number = split + rest_events
        events, grid = (self._positions, rest, split, number), (max(-(-number // _CHUNK), 1),)
        sizes = self._ints(number + 1)
        streams.gaps[grid](
            *events, self._kinds, self._events_from, self._fields_from, sizes, words, CHUNK=_CHUNK, num_warps=_WARPS
        )
        sums = sizes.cumsum_(0)
        unary_from = torch.empty_like(self._events_from)
        kinds = {"CLASSES": CLASSES, "COLUMNS": self._columns, "BYTES": self._shape.WIDTH // 8}
        table = self._rows.on_device
        places.place_streams[(self._segments + 1,)](
            table, self.totals, self._segments, self._changes_from, self._positions_from, self._events_from,
            self._coded, sums, fields_words, unary_from, MANY=_MANY, **kinds,
        )  # fmt: skip
        streams.ones[grid](*events, self._events_from, unary_from, sums, words, CHUNK=_CHUNK, num_warps=_WARPS)
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        places.pack[(self._segments, _PARTS)](
            table, self.totals, self._fields_from, unary_from, words.view(torch.uint8), data, PARTS=_PARTS,
            MANY=_BYTES, **kinds,
        )  # fmt: skip
        return Landing(self.totals, self._choices, self._table, data)
