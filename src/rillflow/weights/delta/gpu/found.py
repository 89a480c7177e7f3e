"""What a batch of segments says, found from its streams: which weights change, and what they become."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from rillflow.weights.delta.gpu import blocks, expand, places, plans
from rillflow.weights.delta.gpu.batch import BLOCK, TABLE, Array, Landing, Rows, Shape, Spans, clear, land
from rillflow.weights.delta.gpu.incoming import Incoming
from rillflow.weights.delta.gpu.launch import kernel
from rillflow.weights.delta.gpu.plans import Plans
from rillflow.weights.delta.gpu.room import Piece, Room

_CHUNK, _BOUNDS, _CHANGES, _CLEARED, _MANY = 1024, 256, 64, 8192, 1024
# Programs of `resolve` on each processor of the device, more than run at once: each has its share of the blocks, and
# some take longer than others.
_PROGRAMS = 64
# Warps of the programs whose number of lanes asks for another one than Triton's four.
_ONES, _LENGTHS, _RESOLVE, _SCATTER = ({"num_warps": number} for number in (4, 8, 1, 4))
# The same without and with sums; the registers are so few that more programs run at once, and not too few.
_SIZES = {False: {"num_warps": 1, "maxnreg": 96}, True: {"num_warps": 1}}


class Report(NamedTuple):
    """What the host has to compare: whether something cannot be; how many records there are; what the weights and the
    changes of each segment add to the fingerprints."""

    fault: bool
    changes: int
    sums: Array

    @classmethod
    def of(cls, landed: Array) -> Report:
        return cls(bool(landed[0]), int(landed[1]), landed[2:].reshape(-1, 2))


class Records(NamedTuple):
    """The changes of a batch: those of a block are in the order of their places."""

    rows: Rows
    records: Piece
    number: int


class Counted:
    """The weights of a batch by classes. `sizes` counts groups and blocks (see `compare`): of each group, what comes
    before a block; `cells` and `groups` are those of `blocks`."""

    def __init__(
        self, some: Spans, address: Array, limits: Array, classes: int, with_sums: bool, shape: Shape,
        device: torch.device,
    ) -> None:  # fmt: skip
        segments, self.classes, self.shape, self.device = len(some), classes, shape, device
        host = Room(device, host=True)
        self.ends, self._landed = host.longs(8), host.longs(2 + 2 * segments)
        self.rows = rows = Rows(some, address, address, shape, device, limits, host)
        room = Room(device)
        self.report, self.group_sizes = room.longs(2 + 3 * segments), room.ints(segments * classes)
        self.sizes = room.ints(rows.count * classes)
        self.cells = room.longs(rows.count * (BLOCK // 4) * (classes // 8))
        self.groups = room.longs(rows.count * (BLOCK // 32) * (classes // 4))
        room.make()
        self.sums, self.seen = self.report.after(2), self.report.after(2 + 2 * segments)
        clear(self.report, _MANY)
        kernel(blocks.sizes, WORDS=BLOCK, CLASSES=classes, SUM=with_sums, **shape.all, **_SIZES[with_sums])(
            (rows.count,), rows.table, rows.owner, rows.limits, self.cells, self.groups, self.sizes, self.sums
        )
        sums = kernel(places.group_sums, CLASSES=classes, MANY=_MANY)
        sums((segments, classes), rows.table, self.sizes, self.group_sizes)
        self.plans, self._done = Plans(segments, classes, shape.WIDTH, device), []
        if device.type == "cuda":
            self._done = [torch.cuda.Event()]  # type: ignore[no-untyped-call]
            self._done[0].record()

    def read(self, incoming: Incoming) -> Landing:
        """Let the device read the tables in what has come, while it does other things. Lands the numbers of `Ends`."""
        with incoming.sent(self._done):
            self.plans.read(incoming.data, incoming.heads, self.rows.limits, self.group_sizes, self.ends)
            return Landing(self.ends, cuda=self.device.type == "cuda")

    def reported(self) -> Landing:
        """What has been reported by all that was launched."""
        land(self.report, self._landed)
        return Landing(self._landed, cuda=self.device.type == "cuda")


class Found:
    """The ranks of all changed weights in their classes, and their changes, group by group; then their records."""

    def __init__(self, numbers: Array, data: Piece, counted: Counted) -> None:
        self._data, self._plan, self._counted, shape = data, counted.plans, counted, counted.shape
        rows, room = counted.rows, Room(counted.device)
        self._ends = ends = self._plan.settle(numbers, room)
        # What no event gives stays as it is: any number is safe, and that one is missing is seen.
        self._ranks, self._places = room.ints(ends.changes), room.ints(ends.events + 1)
        self._words, self._ones = (room.ints(ends.of_ones * plans.WORDS) for _ in range(2))
        self._counts, self._lows = room.ints(ends.of_ones), room.ints(ends.of_events)
        self._bitmap, self._before = room.ints(ends.words), room.ints(ends.words)
        self._bits, self._changes = room.ints(ends.words // _CHUNK + 1), room.numbers(ends.changes, shape.WIDTH)
        self._bounds = room.ints(rows.count * counted.classes + 1)
        self._programs, weights = min(rows.count, _PROGRAMS * _processors(counted.device)), BLOCK * shape.LANES
        self._flags, self._flagged = (room.ints(self._programs * weights // 32) for _ in range(2))
        self._unordered = room.numbers(self._programs * weights, shape.WIDTH)
        room.make()
        self._plan.own()
        self._mark()
        if ends.changes:
            self._read_changes()

    def _mark(self) -> None:
        """Where events end, and from that ranks and bitmaps."""
        sent, ends, seen = self._plan, self._ends, self._counted.seen
        ones, events, others, _ = sent.owners
        if ends.of_ones:
            streams, counts = (sent.streams, ones, sent.ones_from), (self._words, self._ones, self._counts)
            kernel(expand.count_ones, CHUNK=plans.WORDS)((ends.of_ones,), self._data, *streams, *counts)
            find = kernel(expand.find_ones, CHUNK=plans.WORDS, MANY=_MANY, **_ONES)
            find((ends.of_ones,), *counts, *streams, self._places, seen)
        segments, report = len(self._counted.rows.spans), self._counted.report
        check = kernel(expand.check_ones, MANY=_MANY)
        check((-(-segments // _MANY),), sent.streams, self._places, seen, report, segments)
        if ends.words:
            clear(self._bitmap, _CLEARED)
        if ends.of_events:
            grid, subsets = (ends.of_events,), (self._data, events, sent.rows)
            kernel(expand.low_sums, CHUNK=plans.EVENTS)(grid, *subsets, self._lows)
            kernel(expand.mark, CHUNK=plans.EVENTS, MANY=_MANY)(
                grid, *subsets, self._places, self._lows, self._bitmap, self._ranks, report
            )
        if ends.words:
            grid = (-(-ends.words // _CHUNK),)
            kernel(expand.count_bits, CHUNK=_CHUNK)(grid, self._bitmap, self._bits, ends.words)
            rank = kernel(expand.rank_bits, CHUNK=_CHUNK, MANY=_MANY)
            rank(grid, self._bitmap, self._bits, self._before, ends.words)
        if ends.of_others:
            members = kernel(expand.members, CHUNK=plans.WORDS)
            members((ends.of_others,), others, sent.rows, self._bitmap, self._before, self._ranks)

    def _read_changes(self) -> None:
        sent = self._plan
        kernel(expand.changes, CHUNK=plans.EVENTS, WIDTH=self._counted.shape.WIDTH, **_LENGTHS)(
            (self._ends.of_changes,), self._data, sent.owners[3], sent.chunks_from, sent.changes_from, sent.first_row,
            sent.low_from, sent.rows, self._bitmap, self._before, self._changes,
        )  # fmt: skip

    def records(self) -> Records:
        """What the changed weights become. The report gets what that adds to the fingerprints."""
        counted, number = self._counted, self._ends.changes
        rows, shape, classes, device = counted.rows, counted.shape, counted.classes, counted.device
        room = Room(device)
        out = room.numbers(number, shape.WIDTH)
        room.make()
        groups = len(rows.spans) * classes
        kernel(blocks.bounds, CHUNK=_BOUNDS, CLASSES=classes)(
            (-(-rows.count * classes // _BOUNDS),), rows.table, rows.owner, counted.sizes, self._plan.changes_from,
            self._ranks, self._bounds, rows.count * classes, groups,
        )  # fmt: skip
        kernel(blocks.resolve, WORDS=BLOCK, CHUNK=_CHANGES, CLASSES=classes, **shape.all, **_RESOLVE)(
            (self._programs,), rows.table, rows.owner, rows.limits, counted.sizes, counted.cells, counted.groups,
            self._bounds, self._ranks, self._changes, out, rows.begins, rows.records, self._flags, self._flagged,
            self._unordered, counted.sums, counted.report, rows.count, number,
        )  # fmt: skip
        return Records(rows, out, number)


def scatter(found: Records, shape: Shape) -> None:
    """Write all new weights."""
    rows = found.rows
    kernel(blocks.scatter, WORDS=BLOCK, CHUNK=_CHANGES, **shape.bits, **_SCATTER)(
        (rows.count,), rows.table, rows.owner, rows.begins, rows.records, found.records
    )


class Unpacked(NamedTuple):
    """Of each record, in the order of segments and places, where its weight is in its tensor, and the new bits; and of
    each segment, where its own begin, and at last their end."""

    places: torch.Tensor
    values: torch.Tensor
    starts: list[int]


def unpacked(found: Records, shape: Shape, device: torch.device) -> Unpacked:
    rows, room = found.rows, Room(device)
    runs, places = room.longs(rows.count + 1), room.longs(found.number)
    values = room.shorts(found.number) if shape.WIDTH == 16 else room.ints(found.number)
    room.make()
    to = runs.tensor
    to[0] = 0
    torch.cumsum(rows.records.tensor, 0, out=to[1:])
    kernel(blocks.unpack, WORDS=BLOCK, CHUNK=_CHANGES, **shape.bits)(
        (rows.count,), rows.table, rows.owner, rows.begins, rows.records, runs, found.records, places, values
    )
    starts = to[rows.table.tensor.view(-1, TABLE)[:, 4]].tolist()
    return Unpacked(places.tensor, values.tensor, [*starts, found.number])


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
