"""A batch of segments on its way from weights to bit streams. What is found stays on the device until the end."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from rillflow.weights.delta.gpu import compare, streams
from rillflow.weights.delta.gpu.batch import BLOCK, Array, Landing, Rows, Shape, exclusive

CLASSES = 8
_CELLS, _SORTED, _CHUNK = 128, 128, 1024


class Landed(NamedTuple):
    """What the host needs: fingerprints' sums, choices and number of changes of each segment; the columns of the
    tables (items, members, kinds); both streams, each segment's from a new word on, and the bit each ends at."""

    sums: Array
    choices: Array
    changed: Array
    table: Array
    unary_end: Array
    unary: Array
    fields_end: Array
    fields: Array


class Batch:
    """Three steps, each of which gives the numbers that the next one is asked for."""

    def __init__(self, rows: Rows, choices: torch.Tensor, shape: Shape) -> None:
        self._rows, self._choices, self._shape, self._device = rows, choices, shape, choices.device
        self._segments, self._columns = len(rows.spans), 2 * shape.WIDTH
        self._ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        self._longs = partial(torch.empty, dtype=torch.int64, device=self._device)
        self._owner = rows.owner()
        self.sums = torch.zeros((self._segments, 2), dtype=torch.int64, device=self._device)

    def compare(self, *, known: bool) -> Landing:
        """Records of what changed. Lands the number of changes, of coded positions, of chunks of changes."""
        rows, shape = self._rows, self._shape
        wanted, self._emitted, sizes = (
            self._ints(rows.count),
            self._ints(rows.count),
            self._ints((2, rows.count * CLASSES)),
        )
        cells = self._longs(rows.count * (BLOCK // 4) * 3)
        compare.compare[(rows.count,)](
            rows.on_device, self._owner, self._choices, cells, wanted, sizes[0], WORDS=BLOCK, CLASSES=CLASSES,
            **shape.all,
        )  # fmt: skip
        self._records = (self._ints if shape.WIDTH == 16 else self._longs)(rows.count * BLOCK * shape.LANES)
        compare.record[(rows.count,)](
            rows.on_device, self._owner, self._choices, cells, wanted, self._records, self._emitted, sizes[1],
            self.sums, WORDS=BLOCK, CHUNK=_CELLS, CLASSES=CLASSES, **shape.all,
        )  # fmt: skip
        if not known:
            compare.total[(rows.count,)](rows.on_device, self._owner, self.sums, WORDS=BLOCK, LANES=shape.LANES)
        self._sizes, self._changes = exclusive(sizes[0]), exclusive(sizes[1])
        at = rows.group_starts
        self._changes_from = self._changes[at]
        self._group_sizes, changed = torch.diff(self._sizes[at]), torch.diff(self._changes_from)
        others = (self._choices.view(torch.uint8)[:, 8:16] & 1).reshape(-1)  # a byte for each of the eight classes
        self._modes = torch.where((changed > 0) & (changed < self._group_sizes), 1 + others, 0).int()
        coded = torch.where(self._modes == 2, self._group_sizes - changed, changed) * (self._modes > 0)
        self._positions_from = exclusive(coded, torch.int64)
        self._chunks_from = exclusive((changed + _CHUNK - 1) // _CHUNK, torch.int32)
        ends = (self._changes_from[-1], self._positions_from[-1], self._chunks_from[-1])
        return Landing(torch.stack([end.long() for end in ends]))

    def plan(self, changes: int, positions: int, chunks: int) -> Landing:
        """The numbers of the tables. Lands the number of further events, and the words of both streams at most."""
        rows, shape = self._rows, self._shape
        ordered, self._positions = self._ints(changes), self._longs(positions)
        compare.sort[(rows.count,)](
            rows.on_device, self._owner, self._records, self._emitted, self._sizes, self._changes, self._modes,
            self._positions_from, ordered, self._positions, WORDS=BLOCK, CLASSES=CLASSES, CHUNK=_SORTED, **shape.bits,
        )  # fmt: skip
        del self._records, self._emitted, self._sizes, self._changes
        owner = torch.repeat_interleave(torch.diff(self._chunks_from), output_size=chunks)
        self._chunks, self._chunk = chunks, (owner, self._chunks_from, self._changes_from, ordered)
        counts = self._ints((shape.WIDTH + 1) * chunks)
        streams.count[(chunks,)](*self._chunk, counts, chunks, CHUNK=_CHUNK, WIDTH=shape.WIDTH)
        self._counts = exclusive(counts)
        table = self._ints((6, self._segments * CLASSES * self._columns))
        self._table, (_, _, self._kinds, self._coded, bits, most) = table[:3], table.unbind()
        streams.plan[(self._segments * CLASSES,)](
            self._group_sizes, self._changes_from, self._chunks_from, self._modes, self._counts, chunks,
            *table.unbind(), WIDTH=shape.WIDTH,
        )  # fmt: skip
        self._rest_from, self._events_from = self._first_events()
        self._fields_from, self._fields_end = _placed(bits, self._segments)
        unary_most = ((most.view(self._segments, -1).sum(1) + 31) >> 5).sum()
        return Landing(torch.stack([self._rest_from[-1], self._fields_end[-1] >> 5, unary_most]))

    def _first_events(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the events of each subset begin, positions having none; and where they do with those of positions,
        which are apart from all others."""
        rest = self._coded.view(-1, self._columns).clone()
        rest[:, 0] = 0
        rest_from = exclusive(rest, torch.int64)
        found = rest_from.clone()
        found[:-1].view(-1, self._columns)[:, 0] = self._positions_from[:-1]
        return rest_from, found

    def write(self, events: int, fields_words: int, unary_words: int) -> Landing:
        """Both streams. Lands the fields of `Landed`."""
        fields = torch.zeros(fields_words + 1, dtype=torch.int32, device=self._device)
        rest = self._longs(events)
        streams.emit[(self._chunks,)](
            *self._chunk, self._counts, self._chunks, self._kinds, self._coded, self._events_from, self._fields_from,
            rest, fields, CHUNK=_CHUNK, WIDTH=self._shape.WIDTH,
        )  # fmt: skip
        parts = (self._positions, rest)
        ends = [self._gaps(part, fields) for part in parts]
        # The events of a subset are in a row, and so are the subsets: positions among themselves, and all others.
        lengths = torch.diff(ends[1][self._rest_from])
        lengths.view(-1, self._columns)[:, 0] = torch.diff(ends[0][self._positions_from])
        unary_from, unary_end = _placed(lengths, self._segments)
        unary = torch.zeros(unary_words + 1, dtype=torch.int32, device=self._device)
        for part, part_ends in zip(parts, ends, strict=True):
            if grid := -(-len(part) // _CHUNK):
                streams.ones[(grid,)](part, len(part), self._events_from, unary_from, part_ends, unary, CHUNK=_CHUNK)
        changed = torch.diff(self._changes_from[::CLASSES])
        return Landing(self.sums, self._choices, changed, self._table, unary_end, unary, self._fields_end, fields)

    def _gaps(self, events: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        """Prefix sums of the unary bits of events; the low bits of their gaps go to `fields`."""
        sizes = self._ints(len(events))
        if grid := -(-len(events) // _CHUNK):
            streams.gaps[(grid,)](
                events, len(events), self._kinds, self._events_from, self._fields_from, sizes, fields, CHUNK=_CHUNK
            )
        return exclusive(sizes)


def _placed(bits: torch.Tensor, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each column's bits begin when each segment's stream begins at a word, and where each stream ends.

    The last end is rounded up to words.
    """
    sums = exclusive(bits, torch.int64)
    whole = sums[:: len(bits) // segments]
    words = exclusive((torch.diff(whole) + 31) >> 5)
    first = words << 5
    begin = first[:-1] - whole[:-1]
    places = (sums[:-1].view(segments, -1) + begin[:, None]).reshape(-1)
    return places, torch.cat([whole[1:] + begin, first[-1:]])
