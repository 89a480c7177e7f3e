"""The subsets of a batch of segments, found from their streams: which weights change, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rillflow.weights.delta.gpu import expand
from rillflow.weights.delta.gpu.batch import BLOCK, Array, Rows, Shape, exclusive, uploaded
from rillflow.weights.delta.gpu.tables import Plans

_CHUNK, _WORDS, _LOCATED = 1024, 256, 256


class Chunks(NamedTuple):
    """Runs of at most so many items of one owner each: whose each is, and the first one of each owner."""

    owner: Array
    chunks_from: Array


def chunks_of(counts: Array, size: int) -> Chunks:
    number = -(-counts // size)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), number)
    return Chunks(owner, np.append(0, np.cumsum(number)).astype(np.int32))


class Found:
    """The ranks of all changed weights in their classes, and their changes, group by group."""

    def __init__(self, plans: Plans, data: torch.Tensor, classes: int, shape: Shape, device: torch.device) -> None:
        self._plans, self._data, self._classes, self._shape, self._device = plans, data, classes, shape, device
        self._columns = 2 * shape.WIDTH
        self.number = int(plans.changes_from[-1])
        unary_words = (plans.unary[:, 1] + 31 >> 5) - (plans.unary[:, 0] >> 5)
        inverted = plans.kinds[:: self._columns] >> 7
        self._chunks = [
            chunks_of(unary_words, _WORDS),
            chunks_of(np.diff(plans.events_from), _CHUNK),
            chunks_of((plans.total[:: self._columns] + 31 >> 5) * inverted, _WORDS),
            chunks_of(np.diff(plans.changes_from), _CHUNK),
            chunks_of(np.diff(plans.changes_from), _LOCATED),
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
        self._ranks = torch.zeros(self.number, dtype=torch.int32, device=device)
        self._mark(self._places())
        self._changes = self._read_changes()

    def _grid(self, which: int) -> tuple[int]:
        return (len(self._chunks[which].owner),)

    def _places(self) -> torch.Tensor:
        """Where the one-bit of each event is in its stream, if it is there: see `unary_fits`."""
        grid, where = self._grid(0), self._maps[0]
        places = torch.zeros(max(int(self._plans.events_from[-1]), 1), dtype=torch.int32, device=self._device)
        counts = torch.empty(grid[0] * _WORDS, dtype=torch.int32, device=self._device)
        if grid[0]:
            expand.count_ones[grid](self._data, self._unary, *where, counts, CHUNK=_WORDS)
        counts = exclusive(counts)
        if grid[0]:
            expand.find_ones[grid](self._data, self._unary, *where, counts, places, CHUNK=_WORDS)
        self.unary_seen = counts[self._seen[0]], places[self._seen[1]]
        return places

    def unary_fits(self, ones: Array, last: Array) -> bool:
        """Whether the streams have the one-bits that the tables say, given `unary_seen`: how many come before each
        stream, and where the last one of each is, which must be in its last byte: nothing may follow it."""
        begin, end, first, beyond = self._plans.unary.T
        size = np.where(beyond > first, last // 8 + 1, 0)
        return bool(np.all(np.diff(ones) == beyond - first) and np.all(size == (end - begin) // 8))

    def _mark(self, places: torch.Tensor) -> None:
        """Ranks and bitmaps, from the events."""
        words, device = int(self._plans.words_from[-1]), self._device
        self._bitmap = torch.zeros(words + 1, dtype=torch.int32, device=device)
        grid, where = self._grid(1), self._maps[1]
        if grid[0]:
            steps = torch.empty(len(places), dtype=torch.int32, device=device)
            expand.gaps[grid](
                self._data, *where, self._events_from, self._fields_from, self._kinds, self._unary, places, steps,
                CHUNK=_CHUNK, COLUMNS=self._classes * self._columns,
            )  # fmt: skip
            expand.mark[grid](
                *where, self._events_from, self._total, self._kinds, self._words_from, self._changes_from,
                exclusive(steps), self._bitmap, self._ranks, self.fault, CHUNK=_CHUNK, COLUMNS=self._columns,
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
        out = torch.empty(self.number, dtype=torch.int32, device=self._device)
        if self.number:
            expand.changes[self._grid(3)](
                self._data, *self._maps[3], self._changes_from, self._kinds, self._total, self._words_from,
                self._fields_from, self._bitmap, self._before, out, CHUNK=_CHUNK, WIDTH=self._shape.WIDTH,
            )  # fmt: skip
        return out

    def located(
        self, rows: Rows, limits: torch.Tensor, sizes: torch.Tensor, before: torch.Tensor, flags: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Place and new value of each change; `flags` gets a bit of each place."""
        places = torch.empty(self.number, dtype=torch.int32, device=self._device)
        values = torch.empty(
            self.number, dtype=torch.int16 if self._shape.WIDTH == 16 else torch.int32, device=self._device
        )
        if self.number:
            expand.locate[self._grid(4)](
                rows.on_device, *self._maps[4], self._changes_from, limits, sizes, before, self._ranks, self._changes,
                flags, places, values, CHUNK=_LOCATED, WORDS=BLOCK, CLASSES=self._classes, **self._shape.all,
            )  # fmt: skip
        return places, values

    def in_order(
        self, flags: torch.Tensor, cells_from: torch.Tensor, places: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, ascending: as many as there are flags."""
        to_places, to_values = torch.empty_like(places), torch.empty_like(values)
        if self.number:
            expand.deliver[(-(-self.number // _CHUNK),)](
                places, values, flags, cells_from, to_places, to_values, self.number, CHUNK=_CHUNK,
                LANES=self._shape.LANES,
            )  # fmt: skip
        return to_places, to_values


def _pairs(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))
