"""What the tables of a batch of segments say, read by the device: see `subsets`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rillflow.weights.delta.gpu import subsets
from rillflow.weights.delta.gpu.batch import Array
from rillflow.weights.delta.gpu.launch import kernel
from rillflow.weights.delta.gpu.room import Piece, Room

EVENTS, WORDS = subsets.EVENTS_OF.value, subsets.WORDS_OF.value
_STREAM = subsets.STREAM.value
_MANY, _OWNED = 256, 32


class Ends(NamedTuple):
    """How many of each there are. Chunks are of the words of unary streams, of events, of the bitmaps of groups whose
    others are coded, and of changes."""

    faults: int
    events: int
    words: int
    changes: int
    of_ones: int
    of_events: int
    of_others: int
    of_changes: int


class Plans:
    """Of each segment, `streams` (see `subsets.STREAM`) and `ones_from`, its first chunk of words. Of each group, its
    first change, chunk of changes, row, and where its low bits begin. All rows. And of each kind of chunks, the owner
    of each."""

    def __init__(self, segments: int, classes: int, width: int, device: torch.device) -> None:
        self._segments, self._classes, self._width = segments, classes, width
        self._most, groups, room = classes * (width + 2), segments * classes, Room(device)
        self.streams, self._totals, self._starts = (room.longs(segments * number) for number in (_STREAM, 8, 8))
        self.rows, self.low_from = room.longs(segments * self._most * 8), room.longs(groups)
        self.changes_from, self.chunks_from, self.first_row = (room.ints(groups + 1) for _ in range(3))
        self.ones_from = room.ints(segments + 1)
        room.make()

    def read(self, data: Piece, heads: Piece, limits: Piece, sizes: Piece, ends: Piece) -> None:
        """From tables in the data, of segments that are where `heads` say; groups have these sizes. `ends` get what
        `Ends` says, which must be without faults for anything else to be good."""
        constants = {"CLASSES": self._classes, "WIDTH": self._width, "MOST": self._most}
        kernel(subsets.read, num_warps=1, **constants)(
            (self._segments,), data, heads, limits, sizes, self.rows, self.changes_from, self.chunks_from,
            self.first_row, self.low_from, self.streams, self._totals,
        )  # fmt: skip
        add = kernel(subsets.add_up, MANY=_MANY)
        add((1,), self._totals, self._starts, ends, self._segments)

    def settle(self, ends: Array, room: Room) -> Ends:
        """How much there is: for who owns it there is room now. The room is not made yet: see `own`."""
        self.ends = Ends(*ends.tolist())
        self.owners = [room.ints(number) for number in self.ends[4:]]
        return self.ends

    def own(self) -> None:
        """When the room is made: write who owns what, and add what comes before each segment."""
        kernel(subsets.settle, CLASSES=self._classes, MOST=self._most, MANY=_OWNED, num_warps=1)(
            (self._segments,), self.rows, self.changes_from, self.chunks_from, self.low_from, self.streams,
            self.ones_from, self._totals, self._starts, *self.owners, self._segments,
        )  # fmt: skip
