"""What a batch of segments says, found from its streams: which weights change, and what they become."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch

from rillflow.weights.delta.gpu import blocks, expand, places
from rillflow.weights.delta.gpu.batch import BLOCK, Array, Landing, Rows, Shape
from rillflow.weights.delta.gpu.chunks import chunk_maps
from rillflow.weights.delta.gpu.tables import Plans

_CHUNK, _WORDS, _CHANGES = 1024, 256, 128
# Programs of `resolve` on each processor of the device. All of them must fit: each has its share of the blocks.
_PROGRAMS = 20
# Warps of the programs whose number of lanes asks for another one than Triton's four.
_SIZES, _ONES, _RESOLVE, _SCATTER = ({"num_warps": number} for number in (1, 4, 1, 4))


class Counted(NamedTuple):
    """The weights of a batch by classes. `sizes` counts blocks and classes (see `compare`), as prefix sums; `cells` and
    `groups` are those of `blocks`. `report` is for the host: see `Report`; `sums` is a part of it."""

    rows: Rows
    owner: torch.Tensor
    limits: torch.Tensor
    classes: int
    sizes: torch.Tensor
    cells: torch.Tensor
    groups: torch.Tensor
    report: torch.Tensor
    sums: torch.Tensor

    def landing(self) -> Landing:
        """How many weights each group has."""
        number = len(self.rows.spans) * self.classes
        sizes = torch.empty(number, dtype=torch.int32, device=self.sizes.device)
        starts = self.rows.group_starts
        places.differences[(-(-number // _CHUNK),)](self.sizes, starts, sizes, number, MANY=_CHUNK)
        return Landing(sizes)


class Report(NamedTuple):
    """What the host has to compare: whether something cannot be; what the weights and the changes of each segment add
    to the fingerprints; and what `expand.seen` says."""

    fault: bool
    sums: Array
    changes: int
    ones: Array
    last: Array

    @classmethod
    def of(cls, landed: Array) -> Report:
        segments = len(landed) // 4 - 1
        sums, rest = landed[2 : 2 + 2 * segments].reshape(-1, 2), landed[2 + 2 * segments :]
        return cls(bool(landed[0]), sums, int(rest[0]), rest[1 : segments + 2], rest[segments + 2 : 2 * segments + 2])


class Records(NamedTuple):
    """The changes of a batch in the order of their places, and the first one of each block."""

    rows: Rows
    owner: torch.Tensor
    runs: torch.Tensor
    records: torch.Tensor


def counted(rows: Rows, classes: int, with_sums: bool, shape: Shape, device: torch.device) -> Counted:
    """Launch what needs nothing but the weights and the limits of classes, which are `rows.more[0]`."""
    (limits,), owner = rows.more, rows.owner()
    sizes = torch.empty(rows.count * classes + 1, dtype=torch.int32, device=device)
    cells = torch.empty(rows.count * (BLOCK // 4) * (classes // 8), dtype=torch.int64, device=device)
    groups = torch.empty(rows.count * (BLOCK // 32) * (classes // 4), dtype=torch.int64, device=device)
    report = torch.zeros(4 * len(rows.spans) + 4, dtype=torch.int64, device=device)
    sums = report[2:]
    blocks.sizes[(rows.count,)](
        rows.on_device, owner, limits, cells, groups, sizes, sums, WORDS=BLOCK, CLASSES=classes, SUM=with_sums,
        **shape.all, **_SIZES,
    )  # fmt: skip
    return Counted(rows, owner, limits, classes, sizes.cumsum_(0), cells, groups, report, sums)


class Found:
    """The ranks of all changed weights in their classes, and their changes, group by group."""

    def __init__(self, plans: Plans, data: torch.Tensor, counted: Counted, shape: Shape, device: torch.device) -> None:
        self._data, self._counted, self._shape, self._device = data, counted, shape, device
        self._classes, self._columns = counted.classes, plans.columns
        self._ints = partial(torch.empty, dtype=torch.int32, device=device)
        self.number, events = int(plans.changes_from[-1]), int(plans.events_from[-1])
        self._programs, owners = chunk_maps(plans, _CHUNK, _WORDS, device)
        there = plans.parcel.sent()
        self._events_from, self._fields_from, self._words_from, self._changes_from, self._unary = there[:5]
        self._total, self._kinds, *chunks_from = there[5:]
        self._maps = list(zip(owners, chunks_from, strict=True))
        # What no event gives stays as it is: any number is safe, and that one is missing is seen.
        self._ranks, self._places = self._ints(self.number), self._ints(max(events, 1))
        self._find_ones()
        self._mark(int(plans.words_from[-1]))
        self._changes = self._read_changes()

    def _grid(self, which: int) -> tuple[int]:
        return (self._programs[which],)

    def _sums(self, number: int) -> torch.Tensor:
        """For so many numbers after a 0, which become prefix sums in place; the 0 alone is written where there is no
        program to do it."""
        return self._ints(number + 1) if number else torch.zeros(1, dtype=torch.int32, device=self._device)

    def _find_ones(self) -> None:
        """Where the one-bit of each event is in its stream, if it is there: see `Plans.unary_fits`."""
        grid, where = self._grid(0), self._maps[0]
        self._ones = self._sums(grid[0] * _WORDS)
        if grid[0]:
            words = self._ints(grid[0] * _WORDS)
            expand.count_ones[grid](self._data, self._unary, *where, words, self._ones, CHUNK=_WORDS)
            self._ones.cumsum_(0)
            expand.find_ones[grid](words, self._unary, *where, self._ones, self._places, CHUNK=_WORDS, **_ONES)

    def _mark(self, words: int) -> None:
        """Ranks and bitmaps, from the events."""
        self._bitmap = torch.zeros(words + 1, dtype=torch.int32, device=self._device)
        grid, where = self._grid(1), self._maps[1]
        if grid[0]:
            lows = self._sums(grid[0])
            streams = self._data, *where, self._events_from, self._fields_from
            expand.low_sums[grid](*streams, self._kinds, lows, CHUNK=_CHUNK)
            expand.mark[grid](
                *streams, self._total, self._kinds, self._words_from, self._changes_from, self._unary, self._places,
                lows.cumsum_(0), self._bitmap, self._ranks, self._counted.report, CHUNK=_CHUNK, COLUMNS=self._columns,
                CLASSES=self._classes,
            )  # fmt: skip
        counts = self._sums(words + 1)
        expand.count_bits[(words // _CHUNK + 1,)](self._bitmap, counts, words + 1, CHUNK=_CHUNK)
        self._before = counts.cumsum_(0)
        if self._programs[2]:
            expand.members[self._grid(2)](
                *self._maps[2], self._total, self._words_from, self._changes_from, self._bitmap, self._before,
                self._ranks, CHUNK=_WORDS, COLUMNS=self._columns,
            )  # fmt: skip

    def _read_changes(self) -> torch.Tensor:
        """As numbers of the size that records have."""
        kind = torch.int32 if self._shape.WIDTH == 16 else torch.int64
        out = torch.empty(self.number, dtype=kind, device=self._device)
        if self.number:
            expand.changes[self._grid(3)](
                self._data, *self._maps[3], self._changes_from, self._kinds, self._total, self._words_from,
                self._fields_from, self._bitmap, self._before, out, CHUNK=_CHUNK, WIDTH=self._shape.WIDTH,
            )  # fmt: skip
        return out

    def records(self) -> Records:
        """What the changed weights become. The sums of `Counted` get what that adds to the fingerprints."""
        rows, owner, limits, classes, sizes, cells, groups, report, sums = self._counted
        device, shape, count = self._device, self._shape, rows.count
        bounds = torch.empty(count * classes + 1, dtype=torch.int32, device=device)
        blocks.bounds[(-(-count * classes // _WORDS),)](
            rows.on_device, owner, sizes, self._changes_from, self._ranks, bounds, count * classes,
            len(rows.spans) * classes, CHUNK=_WORDS, CLASSES=classes,
        )  # fmt: skip
        runs = self._ints(count + 1)
        blocks.runs[(-(-count // _WORDS),)](
            rows.on_device, owner, sizes, bounds, runs, count, CHUNK=_WORDS, CLASSES=classes
        )
        runs.cumsum_(0)
        out = torch.empty_like(self._changes)
        programs, weights = min(count, _PROGRAMS * _processors(device)), BLOCK * shape.LANES
        flags = torch.zeros(programs * weights // 32, dtype=torch.int32, device=device)
        before = torch.empty_like(flags)
        unordered = torch.empty(programs * weights, dtype=out.dtype, device=device)
        blocks.resolve[(programs,)](
            rows.on_device, owner, limits, sizes, cells.view(torch.int8), groups.view(torch.int16), bounds, runs,
            self._ranks, self._changes, out, flags, before, unordered, sums, report, count, self.number,
            WORDS=BLOCK, CHUNK=_CHANGES, CLASSES=classes, **shape.all, **_RESOLVE,
        )  # fmt: skip
        segments = len(rows.spans)
        expand.seen[(segments // _CHUNK + 1,)](
            self._ones, self._places, self._unary, self._maps[0][1], runs, report[2 + 2 * segments :], segments, count,
            CHUNK=_WORDS, MANY=_CHUNK,
        )  # fmt: skip
        return Records(rows, owner, runs, out)


def scatter(found: Records, shape: Shape) -> None:
    """Write all new weights."""
    blocks.scatter[(found.rows.count,)](
        found.rows.on_device, found.owner, found.runs, found.records, WORDS=BLOCK, CHUNK=_CHANGES, **shape.bits,
        **_SCATTER,
    )  # fmt: skip


def unpacked(found: Records, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each record, where its weight is in its tensor, and the new bits."""
    places = torch.empty(len(found.records), dtype=torch.int64, device=found.records.device)
    values = torch.empty(len(places), dtype=torch.int16 if shape.WIDTH == 16 else torch.int32, device=places.device)
    blocks.unpack[(found.rows.count,)](
        found.rows.on_device, found.owner, found.runs, found.records, places, values, WORDS=BLOCK, CHUNK=_CHANGES,
        **shape.bits,
    )  # fmt: skip
    return places, values


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
