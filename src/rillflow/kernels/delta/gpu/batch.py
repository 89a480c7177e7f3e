"""Memory for kernels, tensors as runs of words, copies to the host, and batches that take turns.

Many arrays share one piece of memory (`Room`): to allocate each alone would take the host longer than all other work.
Every array begins at a multiple of 256 bytes, so that Triton compiles a kernel once for all of them. The memory is not
cleared, and is freed with the last of its arrays.

A batch needs a number from the device now and then. While its copy is under way the next batch gets its turn, so that
the device always has work; how many are under way at once bounds the memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rillflow.kernels.compile import compiled
from rillflow.kernels.delta.format import Layout, layout_of
from rillflow.kernels.delta.gpu import places

_PIECE = 256
# Much memory is asked for in multiples of this: calls that are alike ask for the same.
_LARGE = 1 << 25
_OF_NUMPY = {torch.uint8: np.uint8, torch.int32: np.int32, torch.int64: np.int64}


class Piece:
    """An array of a room, which can be used as soon as the room is made."""

    __slots__ = ("begin", "dtype", "number", "room")

    def __init__(self, room: Room, begin: int, number: int, dtype: torch.dtype) -> None:
        self.room, self.begin, self.number, self.dtype = room, begin, number, dtype

    def after(self, number: int) -> Piece:
        """Return the rest of the array behind its first `number` items, which must be a multiple of 16 bytes."""
        begin = number * self.dtype.itemsize
        assert begin % 16 == 0, "kernels are compiled for pieces that begin at multiples of 16 bytes"
        return Piece(self.room, self.begin + begin, self.number - number, self.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        memory = self.room.memory
        return memory[self.begin : self.begin + self.number * self.dtype.itemsize].view(self.dtype)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The same where the host can reach it."""
        data = self.room.data[self.begin : self.begin + self.number * self.dtype.itemsize]
        return data.view(_OF_NUMPY[self.dtype])


class Room:
    """Memory of a device, or with `host` of the host where the device can reach it too: who lets kernels use that must
    keep it until they are done (see `in_turns`)."""

    def __init__(self, device: torch.device, *, host: bool = False) -> None:
        self._device, self._pinned = torch.device("cpu") if host else device, host and device.type == "cuda"
        self.size = 0

    def _take(self, number: int, dtype: torch.dtype) -> Piece:
        piece = Piece(self, self.size, number, dtype)
        self.size += -(-number * dtype.itemsize // _PIECE) * _PIECE
        return piece

    def bytes(self, number: int) -> Piece:
        return self._take(number, torch.uint8)

    def ints(self, number: int) -> Piece:
        return self._take(number, torch.int32)

    def longs(self, number: int) -> Piece:
        return self._take(number, torch.int64)

    def numbers(self, number: int, width: int) -> Piece:
        """Of 64 bits where weights have 32, else of 32."""
        return self._take(number, torch.int32 if width == 16 else torch.int64)

    def make(self) -> None:
        """Get the memory. Nothing can be taken any more."""
        size = max(self.size, _PIECE)
        if size > _LARGE:
            size = -(-size // _LARGE) * _LARGE
        self.memory = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        if self._device.type == "cpu":
            self.data = self.memory.numpy()


def kernel(function: Any, **constants: int) -> Callable[..., None]:
    """Return what launches a Triton kernel with these constants and options of the compiler: called with the grid, in
    one or two dimensions, and the arguments, on the current stream."""

    def launch(grid: tuple[int, ...], *arguments: Piece | int) -> None:
        found = [one.tensor if isinstance(one, Piece) else one for one in arguments]
        function[grid](*found, **constants)

    return launch


Array = npt.NDArray[Any]
# ---------------------------------------------------------------- tensors and batches

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
    """Return the segments, of 2**log2 weights each, of tensors with these numbers of weights."""
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
    """The addresses of tensors of one dtype, their numbers of weights, and the flat copies that `words_of` made, by the
    tensors' numbers."""

    address: Array
    weights: Array
    copies: dict[int, torch.Tensor]


def located(tensors: Sequence[torch.Tensor], size: int) -> Located:
    """Locate tensors whose weights have `size` bytes each."""
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
    """The table of segments of one batch (see `compare`) and the segment of each block, on the device. For the kernel
    that makes records it also holds the first record of each block and their number.

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
    """Run all works in order, AT_ONCE of them under way. If one raises, wait until other threads and the device no
    longer use its memory, then raise."""
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


# ---------------------------------------------------------------- a thread beside the one of the device

T = TypeVar("T")
_THREADS = 2
_MANY = 1 << 22  # bytes that are worth another thread


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: to start them for each call would take as long as what they do."""
    return ThreadPoolExecutor(_THREADS, "rillflow-delta")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of them


class Later(Generic[T]):
    """Work that another thread does if it is of many bytes, else the one that waits for it. It must not wait for other
    work of this kind."""

    def __init__(self, work: Callable[[], T], total: int) -> None:
        self._work = _pool().submit(work).result if total >= _MANY else work

    def wait(self) -> T:
        return self._work()
