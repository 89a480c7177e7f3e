"""Deltas made on the device. All tensors of a call go through the same few launches, batch by batch.

What a batch costs in memory is some tens of bytes for each changed weight: an estimate, from the call before or from a
sample, decides how many segments it gets and how much room their records have; where that was too little it is made
again with more. The device puts a tensor's bytes in a row; the host fills in header, heads and tables and hashes the
row. It is copied only if the tensor is in several batches. The results of a batch stay on the device until the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Lock

import numpy as np
import torch

from rillflow.kernels.delta.format import (
    HEADER_SIZE,
    MAGIC,
    MOST_LOG2,
    Encoded,
    Header,
    Layout,
    layout_of_pair,
    sealed,
)
from rillflow.kernels.delta.gpu import compare, places, records, streams, tables
from rillflow.kernels.delta.gpu.batch import (
    BLOCK,
    Array,
    Landing,
    Later,
    Piece,
    Room,
    Rows,
    Shape,
    Spans,
    Work,
    alike,
    batches,
    clear,
    in_turns,
    kernel,
    land,
    located,
    own,
    spans,
)
from rillflow.kernels.delta.gpu.tables import HEAD, seal

CLASSES = 8
# `_LISTED` must not be less than the threads of a program: a second thread with the same item would read it too late.
_LISTED, _SORTED, _CHUNK, _MANY, _CLEARED = 128, 128, 1024, 1024, 8192
# The kernel that reads all weights has few registers, so that eight programs share a multiprocessor without spills.
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


# ---------------------------------------------------------------- a call

# Words of a run: 64 runs of each segment are looked at before its classes are chosen.
_RUN, _SHARES, _RUNS, _ROUNDS = 256, 64, 4, 2
_BINS, _SYMBOLS = compare.BINS.value, compare.SYMBOLS.value
# Records of a batch, about. It has at most 32 times as many weights: 32-bit sums hold both together.
_BUDGET = 1 << 25
# The room for records is a multiple of this: calls that are alike ask for the same memory, and small ones have enough.
_ROOM = 1 << 20
_SEGMENT_HEAD = 5
# The share of changed weights in the last call, by dtype and device.
_seen: dict[tuple[Layout, torch.device], float] = {}


class _Job:
    """The tensors of one dtype, and the deltas that come of them."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[int] | None, layout: Layout
    ) -> None:
        self.layout, self.shape, self.device = layout, Shape.of(layout), pairs[0][0].device
        self.kind = layout, self.device
        self.known = None if known is None else np.array(known, np.uint64)
        size = layout.width // 8
        self.old, self.weights, old = located([base for base, _ in pairs], size)
        self.new, _, new = located([new for _, new in pairs], size)
        self._copies = old, new  # which live as long as this does
        self.spans = spans(self.weights, MOST_LOG2)
        self.segments = np.bincount(self.spans.tensor, minlength=len(pairs))
        self.left = self.segments.copy()
        self.sums = np.zeros((len(pairs), 2), np.uint64)
        self.changed = np.zeros(len(pairs), np.int64)
        self.done: dict[int, Encoded] = {}
        # Batches are added by several threads.
        self._lock = Lock()
        # Of tensors that are in several batches, the bytes that are here, by the first weight.
        self._runs: dict[int, dict[int, memoryview]] = {}
        for number in np.flatnonzero(self.left == 0).tolist():
            self._join(number)

    def rows(self, part: slice) -> Rows:
        return Rows(self.spans.part(part), self.old, self.new, self.shape, self.device)

    def add(self, some: Spans, sums: Array, changed: Array, begins: Array, data: Array) -> None:
        """What a batch's segments add to the fingerprints, how many of their weights changed, and their bytes, which
        are in a row; the last ones of a tensor make its delta. If these are all it has, the delta is where they are."""
        first, beyond = some.runs()
        number, start, begin, end = some.tensor[first], some.start[first], begins[first], begins[beyond]
        whole = self.segments[number] == beyond - first
        with self._lock:
            self.sums[number] += np.add.reduceat(sums.view(np.uint64), first)
            self.changed[number] += np.add.reduceat(changed, first)
            self.left[number] -= beyond - first
            for run in np.flatnonzero(~whole).tolist():
                here, at = int(number[run]), int(start[run])
                room = 0 if at else HEADER_SIZE
                self._runs.setdefault(here, {})[at] = data.data[begin[run] + room : end[run]]
                if not self.left[here]:
                    self._join(here)
        self._seal(number[whole], begin[whole], end[whole], data)

    def _prints(self, number: Array) -> tuple[Array, Array]:
        """The fingerprints of old and new tensors whose segments have all been added."""
        base = self.sums[number, 0] if self.known is None else self.known[number]
        return base, base + self.sums[number, 1]

    def _seal(self, number: Array, begin: Array, end: Array, data: Array) -> None:
        """Make the deltas of tensors whose bytes are all here, with room for the header before them."""
        base, result = self._prints(number)
        heads = np.zeros(len(number), HEAD)
        heads["magic"], heads["dtype"], heads["log2"] = MAGIC, self.layout.code, MOST_LOG2
        heads["weights"], heads["base"], heads["result"] = self.weights[number], base, result
        seal(data, begin, end, heads)
        view = data.data.toreadonly()
        facts = (column.tolist() for column in (number, begin, end, base, result, self.changed[number]))
        for place, first, beyond, *rest in zip(*facts, strict=True):
            self.done[place] = Encoded(view[first:beyond], *rest)

    def _join(self, number: int) -> None:
        """The same for a tensor whose bytes are in several places, or that has none."""
        base, result = (int(value[0]) for value in self._prints(np.array([number])))
        header = Header(self.layout.code, MOST_LOG2, int(self.weights[number]), base, result)
        runs = self._runs.pop(number, {})
        data = sealed(header, [runs[start] for start in sorted(runs)])
        self.done[number] = Encoded(data, base, result, int(self.changed[number]))


def encode_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[int] | None = None
) -> list[Encoded]:
    """The deltas that make each second tensor of the first; all of them are on one device.

    `known` are the fingerprints of the first ones, if the caller has them: it saves a pass over them.
    """
    for base, new in pairs:
        layout_of_pair(base, new)
    by_layout = alike([base for base, _ in pairs])
    found: dict[int, Encoded] = {}
    for layout, numbers in by_layout.items():
        job = _Job([pairs[number] for number in numbers], known and [known[number] for number in numbers], layout)
        if len(job.spans):
            rows, choices = _choose(job)
            estimates = _estimates(job, choices)
            parts = batches(np.maximum(estimates, job.spans.weights // 32), _BUDGET)
            in_turns([partial(_encode, job, choices, part, _room(estimates[part])) for part in parts])
            del rows
            _seen[job.kind] = int(job.changed.sum()) / int(job.weights.sum())
        found |= {number: job.done[place] for place, number in enumerate(numbers)}
    return [found[number] for number in range(len(pairs))]


def encode_gpu(base: torch.Tensor, new: torch.Tensor, known: int | None = None) -> Encoded:
    """The delta that makes `new` of `base`, of which `known` is the fingerprint, if the caller has it."""
    return encode_many([(base, new)], None if known is None else [known])[0]


def _choose(job: _Job) -> tuple[Rows, Piece]:
    """A row of each segment: see `compare.choose`; and what must live until the device has made them."""
    rows, count, room = job.rows(slice(None)), len(job.spans), Room(job.device)
    histogram, lowest = room.ints(count * _BINS * _SYMBOLS), room.ints(count)
    scratch, choices = room.ints(count * CLASSES * _BINS), room.longs(count * 4)
    room.make()
    clear(histogram, 1 << 14)
    constants = {"WORDS": _RUN, "RUNS": _RUNS, "SHARES": _SHARES, "ROUNDS": _ROUNDS}
    kernel(compare.sample, **constants, **job.shape.all)(
        (count, _SHARES // (_RUNS * _ROUNDS)), rows.table, histogram, lowest
    )
    kernel(compare.choose, CLASSES=CLASSES)((count,), rows.table, histogram, lowest, scratch, choices)
    return rows, choices


def _estimates(job: _Job, choices: Piece) -> Array:
    """How many records each segment has, more or less: by what changed of such weights the last time, because one step
    of training is like the next; the first time the device is waited for."""
    share = _seen.get(job.kind)
    if share is None:
        found: Array = choices.tensor.view(-1, 4)[:, 3].cpu().numpy()
        return found
    return (job.spans.weights * share).astype(np.int64)


def _room(estimates: Array) -> int:
    """For the records of a batch: a quarter more than are expected, and some."""
    return (int(estimates.sum()) * 5 // 4 // _ROOM + 1) * _ROOM


def _encode(job: _Job, choices: Piece, part: slice, room: int) -> Work:
    """One batch, to the bytes of its segments. Yields where it waits for numbers."""
    rows = job.rows(part)
    batch = Batch(rows, choices.after(4 * part.start), job.shape, job.device)
    (numbers,) = yield batch.compare(room, known=job.known is not None)
    if numbers[0] > room:
        del batch
        yield from _again(job, choices, part, int(numbers[0]))
        return
    if numbers[1]:
        (numbers,) = yield batch.plan(*map(int, numbers[1:]))
        landed = yield batch.write(*map(int, numbers))
        yield Later(partial(_finish, job, rows.spans, *landed), len(landed[-1]))
    else:
        (totals,) = yield batch.unchanged()
        totals = totals.reshape(-1, 8)[:-1]
        sizes = np.where(rows.spans.start == 0, HEADER_SIZE, 0) + _SEGMENT_HEAD
        begins = np.append(0, np.cumsum(sizes))
        # The heads of segments in which nothing changed are zeros.
        data = np.zeros(begins[-1], np.uint8)
        job.add(rows.spans, totals[:, :2], totals[:, 7], begins, data)


def _finish(job: _Job, some: Spans, totals: Array, choices: Array, table: Array, data: Array) -> None:
    """The tables of a batch, and the deltas of its tensors."""
    totals = totals.reshape(-1, 8)
    tables.write(data, some, totals, choices.reshape(-1, 4), table, job.shape.WIDTH)
    job.add(some, totals[:-1, :2], totals[:-1, 7], totals[:, 6], data)


def _again(job: _Job, choices: Piece, part: slice, room: int) -> Work:
    """Encode a batch again whose records did not fit: with room for all, or in halves if that is too much."""
    middle = (part.start + part.stop) // 2
    if room <= 2 * _BUDGET or middle == part.start:
        yield from _encode(job, choices, part, room)
    else:
        yield from _encode(job, choices, slice(part.start, middle), room // 2)
        yield from _encode(job, choices, slice(middle, part.stop), room // 2)
