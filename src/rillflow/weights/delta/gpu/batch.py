"""What both directions share: tensors as runs of words, copies to the host, and batches that take turns.

A batch needs a number from the device now and then. While its copy is under way the next batch gets its turn, so that
the device always has work; how many are under way at once bounds the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rillflow.weights.delta.format import Layout
from rillflow.weights.delta.gpu import places

Array = npt.NDArray[Any]
WORD, _ALIGNED = 8, 16
# Words of a block: what one program of a kernel looks at. Ranks within it have 12 bits.
BLOCK = 1024
AT_ONCE = 2


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

    def runs(self) -> list[tuple[int, int]]:
        """The first segment of each tensor, and the one beyond its last."""
        firsts = np.flatnonzero(np.diff(self.tensor, prepend=-1)).tolist()
        return list(zip(firsts, [*firsts[1:], len(self)], strict=True))


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
    size = np.broadcast_to(np.left_shift(1, log2), weights.shape)
    number = -(-weights // size)
    tensor = np.repeat(np.arange(len(weights)), number)
    start = (np.arange(len(tensor)) - (np.cumsum(number) - number)[tensor]) * size[tensor]
    return Spans(tensor, start, np.minimum(size[tensor], weights[tensor] - start))


def batches(costs: Array, budget: int) -> list[slice]:
    """Runs of segments whose costs fit the budget; at least one each."""
    found, start, total = [], 0, 0
    for number, cost in enumerate(costs.tolist()):
        if number > start and total + cost > budget:
            found.append(slice(start, number))
            start, total = number, 0
        total += cost
    return [*found, slice(start, len(costs))] if len(costs) else []


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """What holds the tensor's words: itself, or a flat copy if it is not one run that begins and ends at multiples of
    16 bytes. (Itself, and no view of it: hundreds of views would take longer than all else that is done per tensor.)"""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0 and tensor.nbytes % _ALIGNED == 0:
        return tensor
    flat = tensor.detach().reshape(-1)
    padded = flat.new_zeros(-(-flat.nbytes // _ALIGNED) * _ALIGNED // flat.element_size())
    padded[: len(flat)] = flat
    return padded


class Rows:
    """The table of segments (see `compare`) of one batch, here and on the device. On the device alone: where each group
    begins in what is counted per block and class, and the end of it all; and `more`, which travels along."""

    def __init__(
        self, spans: Spans, old: Array, new: Array, shape: Shape, classes: int, device: torch.device, *more: Array
    ) -> None:
        lanes = shape.LANES
        self.spans = spans
        byte = spans.start * (WORD // lanes)
        blocks = -(-spans.weights // (BLOCK * lanes))
        self.table = np.zeros((len(blocks), 8), np.int64)
        self.table[:, 0], self.table[:, 1] = old[spans.tensor] + byte, new[spans.tensor] + byte
        self.table[:, 2], self.table[:, 3] = spans.weights, spans.start // lanes
        self.table[:, 5], self.table[:, 6] = blocks, np.cumsum(blocks)
        self.table[:, 4] = self.table[:, 6] - blocks
        self.count = int(blocks.sum())
        starts = self.table[:, 4:5] * classes + np.arange(classes) * self.table[:, 5:6]
        groups = np.append(starts.reshape(-1), self.count * classes)
        self.on_device, self.group_starts, *self.more = uploaded([self.table, groups, *more], device)

    def owner(self) -> torch.Tensor:
        """The segment of each block."""
        return owners(self.on_device, len(self.spans), self.count, FIRST=4, LAST=6, STRIDE=8)


class Landing:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._tensors = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for to, tensor in zip(self._tensors, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._tensors = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Array]:
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class Parcel:
    """Arrays of 64-bit and of 32-bit numbers in one piece of memory, so that one copy brings all to the device. Each
    begins at a multiple of 16 bytes there, for which kernels are compiled. What was not written is anything."""

    def __init__(self, longs: Sequence[int], ints: Sequence[int], device: torch.device) -> None:
        self._longs, self._ints = [-(-number // 2) * 2 for number in longs], [-(-number // 4) * 4 for number in ints]
        self._split, self._device = sum(self._longs), device
        words = self._split + sum(self._ints) // 2
        self._buffer = torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        data = self._buffer.numpy()
        self.arrays = [
            *_parts(data[: self._split], longs, self._longs),
            *_parts(data[self._split :].view(np.int32), ints, self._ints),
        ]

    def sent(self) -> list[torch.Tensor]:
        """The arrays on the device, with what fills them up. Nothing is waited for."""
        there = self._buffer.to(self._device, non_blocking=True)
        longs, ints = there[: self._split], there[self._split :].view(torch.int32)
        return [*longs.split_with_sizes(self._longs), *ints.split_with_sizes(self._ints)]


def _parts(data: Array, numbers: Sequence[int], rooms: Sequence[int]) -> list[Array]:
    ends = accumulate(rooms)
    return [data[end - room : end - room + number] for number, room, end in zip(numbers, rooms, ends, strict=True)]


def uploaded(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copies on the device, by one transfer that waits for nothing."""
    begins, size = [], 0
    for array in arrays:
        begins.append(size)
        size += -(-array.nbytes // 16) * 16
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    data = buffer.numpy()
    for array, begin in zip(arrays, begins, strict=True):
        data[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = buffer.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, begin in zip(arrays, begins, strict=True)
    ]


Work = Generator[Landing, list[Array], None]


def in_turns(works: Iterable[Callable[[], Work]]) -> None:
    """Run all of them, in order, AT_ONCE of them under way."""
    left, under_way = iter(works), deque[tuple[Work, Landing]]()
    while True:
        while len(under_way) < AT_ONCE and (start := next(left, None)) is not None:
            work = start()
            _turn(under_way, work, None)
        if not under_way:
            return
        work, landing = under_way.popleft()
        _turn(under_way, work, landing.wait())


def _turn(under_way: deque[tuple[Work, Landing]], work: Work, arrived: list[Array] | None) -> None:
    try:
        landing = next(work) if arrived is None else work.send(arrived)
    except StopIteration:
        return
    under_way.append((work, landing))


def owners(starts: torch.Tensor, rows: int, count: int, **columns: int) -> torch.Tensor:
    """Whose each of so many is: `starts` says of each row where its own begin and end (see `places.own`)."""
    found = torch.empty(count, dtype=torch.int32, device=starts.device)
    if rows:
        places.own[(rows,)](starts, found, MANY=128, **columns)
    return found
