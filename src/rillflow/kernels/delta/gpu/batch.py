"""Tensors as runs of words, copies to the host, and batches that take turns.

A batch needs a number from the device now and then. While its copy is under way the next batch gets its turn, so that
the device always has work; how many are under way at once bounds the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rillflow.kernels.compile import compiled
from rillflow.kernels.delta.format import Layout, layout_of
from rillflow.kernels.delta.gpu import places
from rillflow.kernels.delta.gpu.room import Piece, Room, kernel

Array = npt.NDArray[Any]
WORD, _ALIGNED = 8, 16
# Words of a block: what one program of a kernel looks at. Ranks within it have 12 bits.
BLOCK = 1024
AT_ONCE = 2
TABLE = 8  # numbers of a segment in the table


@dataclass(frozen=True, slots=True)
class Spans:
    """Segments in their order: of each the number of its tensor, its first weight there, how many it has."""

    tensor: Array
    start: Array
    weights: Array

    def __len__(self) -> int:
        return len(self.tensor)

    def part(self, part: slice) -> Spans:
        return Spans(self.tensor[part], self.start[part], self.weights[part])

    def runs(self) -> tuple[Array, Array]:
        """The first segment of each tensor, and the one beyond its last."""
        firsts = np.flatnonzero(np.diff(self.tensor, prepend=-1))
        return firsts, np.append(firsts[1:], len(self))


class Shape(NamedTuple):
    """The constants that kernels are compiled for, beside those of one kernel alone."""

    WIDTH: int
    LANES: int
    MANTISSA: int
    EXPONENTS: int

    @classmethod
    def of(cls, layout: Layout) -> Shape:
        return cls(layout.width, 64 // layout.width, layout.mantissa, layout.exponents)

    @property
    def bits(self) -> dict[str, int]:
        return {"WIDTH": self.WIDTH, "LANES": self.LANES}

    @property
    def all(self) -> dict[str, int]:
        return self._asdict()


def spans(weights: Array, log2: Array | int) -> Spans:
    """The segments, of 2**log2 weights, of tensors of so many."""
    size = np.broadcast_to(np.left_shift(1, log2), weights.shape).astype(np.int64)
    tensor, start, count = np.empty((3, int((-(-weights // size)).sum())), np.int64)
    _spans(weights, size, tensor, start, count)
    return Spans(tensor, start, count)


@compiled
def _spans(weights: Array, size: Array, tensor: Array, start: Array, count: Array) -> None:
    s = 0
    for number in range(len(weights)):
        for first in range(0, weights[number], size[number]):
            tensor[s], start[s], count[s] = number, first, min(size[number], weights[number] - first)
            s += 1


def batches(costs: Array, budget: int) -> list[slice]:
    """Runs of segments whose costs fit the budget; at least one each."""
    found, sums = [0], np.cumsum(costs)
    while found[-1] < len(costs):
        start = found[-1]
        before = sums[start - 1] if start else 0
        found.append(max(start + 1, int(np.searchsorted(sums, before + budget, side="right"))))
    return [slice(*pair) for pair in pairwise(found)]


def alike(tensors: Sequence[torch.Tensor]) -> dict[Layout, Sequence[int]]:
    """The numbers of the tensors of each dtype."""
    kinds = [tensor.dtype for tensor in tensors]
    if len(set(kinds)) == 1:
        return {layout_of(tensors[0]): range(len(tensors))}
    found: dict[Layout, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(layout_of(tensor), []).append(number)
    return {**found}


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """What holds the tensor's words: itself, or a flat copy if it is not one run that begins and ends at multiples of
    16 bytes. (Itself, and no view of it: hundreds of views would take longer than all else that is done per tensor.)"""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0 and tensor.nbytes % _ALIGNED == 0:
        return tensor
    flat = tensor.detach().reshape(-1)
    padded = flat.new_zeros(-(-flat.nbytes // _ALIGNED) * _ALIGNED // flat.element_size())
    padded[: len(flat)] = flat
    return padded


class Located(NamedTuple):
    """Where the words of tensors of one dtype are, how many weights each has, and the flat copies of those that
    `words_of` copies, by their numbers."""

    address: Array
    weights: Array
    copies: dict[int, torch.Tensor]


def located(tensors: Sequence[torch.Tensor], size: int) -> Located:
    """Of tensors whose weights have so many bytes."""
    number = len(tensors)
    address = np.fromiter([tensor.data_ptr() for tensor in tensors], np.int64, number)
    weights = np.fromiter([tensor.numel() for tensor in tensors], np.int64, number)
    plain = np.fromiter([tensor.is_contiguous() for tensor in tensors], np.bool, number)
    plain &= (address | weights * size) % _ALIGNED == 0
    copies = {number: words_of(tensors[number]) for number in np.flatnonzero(~plain).tolist()}
    for number, copy in copies.items():
        address[number] = copy.data_ptr()
    return Located(address, weights, copies)


class Rows:
    """The table of segments (see `compare`) of one batch, and the segment of each block; and for who makes records, of
    each block, where they begin and how many there are. All of it is on the device.

    The host's memory that the rows were written to is kept until the device has read them.
    """

    def __init__(self, spans: Spans, old: Array, new: Array, shape: Shape, device: torch.device) -> None:
        self.spans, self._host = spans, Room(device, host=True)
        rows = self._host.longs(len(spans) * TABLE)
        self._host.make()
        table = rows.array.reshape(-1, TABLE)
        lanes = shape.LANES
        self.count = _fill(table, spans.tensor, spans.start, spans.weights, old, new, lanes, WORD // lanes, BLOCK)
        room = Room(device)
        self.table = room.longs(len(spans) * TABLE)
        self.owner, self.records, self.begins = room.ints(self.count), room.ints(self.count), room.longs(self.count)
        room.make()
        kernel(places.spread, MANY=256)((len(spans),), rows, self.table, self.owner)


@compiled
def _fill(
    table: Array, tensor: Array, start: Array, weights: Array, old: Array, new: Array, lanes: int, size: int, words: int
) -> int:  # fmt: skip
    """Write the rows; how many blocks there are."""
    first = 0
    for s in range(len(tensor)):
        blocks = (weights[s] + words * lanes - 1) // (words * lanes)
        table[s, 0], table[s, 1] = old[tensor[s]] + start[s] * size, new[tensor[s]] + start[s] * size
        table[s, 2], table[s, 3] = weights[s], start[s] // lanes
        table[s, 4], table[s, 5], table[s, 6], table[s, 7] = first, blocks, first + blocks, 0
        first += blocks
    return first


class Landing:
    """Arrays where the host can reach them, written by what was launched before, or by copies of which these are."""

    def __init__(self, *pieces: Piece, cuda: bool) -> None:
        self._pieces = pieces
        self._event: torch.cuda.Event | None = None
        if cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Array]:
        if self._event is not None:
            self._event.synchronize()
        return [piece.array for piece in self._pieces]


def clear(piece: Piece, many: int) -> None:
    """Write zeros, a fixed number by each program."""
    kernel(places.clear, MANY=many)((-(-piece.number // many),), piece, piece.number)


def land(source: Piece, to: Piece, many: int = 1024) -> None:
    """Let the device copy as many numbers as there is room for to where the host can reach them: for few of them."""
    kernel(places.land, MANY=many)((-(-to.number // many),), source, to, to.number)


class Waiting(Protocol):
    """The work that a batch waits for."""

    def wait(self) -> Any: ...


Work = Generator[Waiting, Any, None]


def in_turns(works: Iterable[Callable[[], Work]]) -> None:
    """Run all of them, in order, AT_ONCE of them under way. Whatever is raised, other threads and the device are done
    with the memory that they have: nobody else would know when they are."""
    left, under_way = iter(works), deque[tuple[Work, Waiting]]()
    try:
        while True:
            while len(under_way) < AT_ONCE and (start := next(left, None)) is not None:
                work = start()
                _turn(under_way, work, None)
            if not under_way:
                return
            work, landing = under_way.popleft()
            _turn(under_way, work, landing.wait())
    except BaseException:
        for _, landing in under_way:
            with suppress(Exception):
                landing.wait()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        raise


def _turn(under_way: deque[tuple[Work, Waiting]], work: Work, arrived: Any) -> None:
    try:
        landing = next(work) if arrived is None else work.send(arrived)
    except StopIteration:
        return
    under_way.append((work, landing))


def own(starts: Piece, rows: int, owner: Piece) -> None:
    """Write whose each of some is: `starts` says of each row where its own begin, and where those of the last end."""
    kernel(places.own, MANY=128)((rows,), starts, owner)
