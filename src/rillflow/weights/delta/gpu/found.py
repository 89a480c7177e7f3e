"""What a batch of segments says, found from its streams: which weights change, and what they become."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from rillflow.weights.delta.gpu import blocks, expand
from rillflow.weights.delta.gpu.batch import BLOCK, Array, Rows, Shape, exclusive, uploaded
from rillflow.weights.delta.gpu.tables import Plans

_CHUNK, _WORDS, _CHANGES = 1024, 256, 128
# Programs of `resolve` on each processor of the device. All of them must fit: each has its share of the blocks.
_PROGRAMS = 16
# Warps of the programs whose number of lanes asks for another one than Triton's four.
_SIZES, _ONES, _RESOLVE, _SCATTER = ({"num_warps": number} for number in (2, 8, 1, 1))


class Counted(NamedTuple):
    """The weights of a batch by classes. `sizes` counts blocks and classes (see `compare`), as prefix sums; `cells` and
    `groups` are those of `blocks`."""

    rows: Rows
    owner: torch.Tensor
    limits: torch.Tensor
    classes: int
    sizes: torch.Tensor
    cells: torch.Tensor
    groups: torch.Tensor
    sums: torch.Tensor


class Records(NamedTuple):
    """The changes of a batch in the order of their places, and the first one of each block."""

    rows: Rows
    owner: torch.Tensor
    runs: torch.Tensor
    records: torch.Tensor


class _Chunks(NamedTuple):
    """Runs of at most so many items of one owner each: whose each is, and the first one of each owner."""

    owner: Array
    chunks_from: Array


def _chunks_of(counts: Array, size: int) -> _Chunks:
    number = -(-counts // size)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), number)
    return _Chunks(owner, np.append(0, np.cumsum(number)).astype(np.int32))


def counted(rows: Rows, classes: int, with_sums: bool, shape: Shape, device: torch.device) -> Counted:
    """Launch what needs nothing but the weights and the limits of classes, which are `rows.more[0]`."""
    (limits,), owner = rows.more, rows.owner()
    sizes = torch.empty(rows.count * classes, dtype=torch.int32, device=device)
    cells = torch.empty(rows.count * (BLOCK // 4) * (classes // 8), dtype=torch.int64, device=device)
    groups = torch.empty(rows.count * (BLOCK // 32) * (classes // 4), dtype=torch.int64, device=device)
    sums = torch.zeros((len(rows.spans), 2), dtype=torch.int64, device=device)
    blocks.sizes[(rows.count,)](
        rows.on_device, owner, limits, cells, groups, sizes, sums, WORDS=BLOCK, CLASSES=classes, SUM=with_sums,
        **shape.all, **_SIZES,
    )  # fmt: skip
    return Counted(rows, owner, limits, classes, exclusive(sizes), cells, groups, sums)


class Found:
    """The ranks of all changed weights in their classes, and their changes, group by group."""

    def __init__(self, plans: Plans, data: torch.Tensor, counted: Counted, shape: Shape, device: torch.device) -> None:
        self._plans, self._data, self._counted, self._shape, self._device = plans, data, counted, shape, device
        self._classes, self._columns = counted.classes, 2 * shape.WIDTH
        self.number = int(plans.changes_from[-1])
        unary_words = (plans.unary[:, 1] + 31 >> 5) - (plans.unary[:, 0] >> 5)
        inverted = plans.kinds[:: self._columns] >> 7
        self._chunks = [
            _chunks_of(unary_words, _WORDS),
            _chunks_of(np.diff(plans.events_from), _CHUNK),
            _chunks_of((plans.total[:: self._columns] + 31 >> 5) * inverted, _WORDS),
            _chunks_of(np.diff(plans.changes_from), _CHUNK),
        ]
        whole: list[Array] = [
            plans.total,
            plans.kinds,
            plans.events_from,
            plans.fields_from,
            plans.words_from,
            plans.changes_from,
        ]
        maps = [array for chunks in self._chunks for array in (chunks.owner, chunks.chunks_from)]
        # Of each segment: where its first word is among the counts of ones, and its last event among all.
        seen = [self._chunks[0].chunks_from.astype(np.int64) * _WORDS, np.maximum(plans.unary[:, 3] - 1, 0)]
        there = uploaded([*whole, plans.unary, *seen, *maps], device)
        self._total, self._kinds, self._events_from, self._fields_from, self._words_from, self._changes_from = there[:6]
        self._unary, self._seen, self._maps = there[6], there[7:9], _pairs(there[9:])
        self.fault = torch.zeros((), dtype=torch.int32, device=device)
        # What no event gives stays as it is: any number is safe, and that one is missing is seen.
        self._ranks = torch.empty(self.number, dtype=torch.int32, device=device)
        self._mark(self._places())
        self._changes = self._read_changes()

    def _grid(self, which: int) -> tuple[int]:
        return (len(self._chunks[which].owner),)

    def _places(self) -> torch.Tensor:
        """Where the one-bit of each event is in its stream, if it is there: see `Plans.unary_fits`."""
        grid, where = self._grid(0), self._maps[0]
        places = torch.empty(max(int(self._plans.events_from[-1]), 1), dtype=torch.int32, device=self._device)
        words, counts = torch.empty((2, grid[0] * _WORDS), dtype=torch.int32, device=self._device)
        if grid[0]:
            expand.count_ones[grid](self._data, self._unary, *where, words, counts, CHUNK=_WORDS)
        counts = exclusive(counts)
        if grid[0]:
            expand.find_ones[grid](words, self._unary, *where, counts, places, CHUNK=_WORDS, **_ONES)
        self.unary_seen = counts[self._seen[0]], places[self._seen[1]]
        return places

    def _mark(self, places: torch.Tensor) -> None:
        """Ranks and bitmaps, from the events."""
        words, device = int(self._plans.words_from[-1]), self._device
        self._bitmap = torch.zeros(words + 1, dtype=torch.int32, device=device)
        grid, where = self._grid(1), self._maps[1]
        if grid[0]:
            lows = torch.empty(grid[0], dtype=torch.int32, device=device)
            streams = self._data, *where, self._events_from, self._fields_from
            expand.low_sums[grid](*streams, self._kinds, lows, CHUNK=_CHUNK)
            expand.mark[grid](
                *streams, self._total, self._kinds, self._words_from, self._changes_from, self._unary, places,
                exclusive(lows), self._bitmap, self._ranks, self.fault, CHUNK=_CHUNK, COLUMNS=self._columns,
                CLASSES=self._classes,
            )  # fmt: skip
        counts = torch.empty(words + 1, dtype=torch.int32, device=device)
        expand.count_bits[(words // _CHUNK + 1,)](self._bitmap, counts, words + 1, CHUNK=_CHUNK)
        self._before = exclusive(counts)
        if self._grid(2)[0]:
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
        rows, owner, limits, classes, sizes, cells, groups, sums = self._counted
        device, shape, count = self._device, self._shape, rows.count
        bounds = torch.empty(count * classes + 1, dtype=torch.int32, device=device)
        blocks.bounds[(-(-count * classes // _WORDS),)](
            rows.on_device, owner, sizes, self._changes_from, self._ranks, bounds, count * classes,
            len(rows.spans) * classes, CHUNK=_WORDS, CLASSES=classes,
        )  # fmt: skip
        runs = torch.empty(count, dtype=torch.int32, device=device)
        blocks.runs[(-(-count // _WORDS),)](
            rows.on_device, owner, sizes, bounds, runs, count, CHUNK=_WORDS, CLASSES=classes
        )
        runs = exclusive(runs)
        out = torch.empty_like(self._changes)
        programs, weights = min(count, _PROGRAMS * _processors(device)), BLOCK * shape.LANES
        flags = torch.zeros(programs * weights // 32, dtype=torch.int32, device=device)
        before = torch.empty_like(flags)
        unordered = torch.empty(programs * weights, dtype=out.dtype, device=device)
        blocks.resolve[(programs,)](
            rows.on_device, owner, limits, sizes, cells.view(torch.int8), groups.view(torch.int16), bounds, runs,
            self._ranks, self._changes, out, flags, before, unordered, sums, self.fault, count, self.number,
            WORDS=BLOCK, CHUNK=_CHANGES, CLASSES=classes, **shape.all, **_RESOLVE,
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


def _pairs(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))
