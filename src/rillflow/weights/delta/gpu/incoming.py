"""The bytes of a batch of segments on their way to the device, and their checksums."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache

import numpy as np
import torch
import xxhash

from rillflow.weights.delta.gpu import heads
from rillflow.weights.delta.gpu.batch import Array, Spans
from rillflow.weights.delta.gpu.memory import copy_bytes, digest_function, digest_of
from rillflow.weights.delta.gpu.room import Piece, Room
from rillflow.weights.delta.gpu.threads import divided, shared
from rillflow.weights.delta.jit import compiled

_CHECKSUM, _SEALED = heads.CHECKSUM, heads.SEALED


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """What copies to the device while its kernels run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Incoming:
    """Bytes that other threads copy to memory which the device can read, and the device then to its own.

    Of a tensor that is in this batch alone, that is the whole delta without its checksum, which is computed from what
    was copied. Of others it is from their first segment here to the last that has bytes.

    `data` are whole words, and one more than there are; `begin` is where each segment's bytes begin in them. Nothing is
    in them before `arrived` was called. The memory on the device is there at once, so that the copy need not wait for
    kernels that are launched in between.
    """

    def __init__(
        self, deltas: heads.Deltas, checksums: heads.Checksums, some: Spans, begin: Array, size: Array,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._deltas, self._checksums, self._device = deltas, checksums, device
        first, beyond = some.runs()
        self._tensor, before = some.tensor[first], begin[first]
        length = deltas.length[self._tensor]
        self._whole = (some.start[first] == 0) & (begin[beyond - 1] + size[beyond - 1] == length)
        self._from = deltas.address[self._tensor] + np.where(self._whole, 0, before)
        last = np.maximum.reduceat(np.where(size > 0, begin + size, 0), first)
        sizes = np.where(self._whole, length - _CHECKSUM, np.maximum(last - before, 0))
        self._to = np.append(0, np.cumsum(sizes))
        moved = self._to[:-1] - np.where(self._whole, _CHECKSUM, before)
        self.begin = begin + np.repeat(moved, beyond - first)
        words = int(self._to[-1]) // 4 + 2
        host, room = Room(device, host=True), Room(device)
        self._here, self._there = host.ints(words), room.ints(words)
        host.make()
        self.data: Array = self._here.array.view(np.uint8)
        self.data[-8:] = 0
        if device.type == "cuda":
            # Whatever used this memory before is done when this event is.
            room.make()
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free.record()
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        """Copy, and let other threads copy."""
        self._under_way = divided(self._copy, int(self._to[-1]))

    def _copy(self, first: int, beyond: int) -> None:
        _copy_bytes(self._here.address, first, beyond, self._from, self._to, self._whole)

    def _compute(self, first: int, beyond: int) -> None:
        """The checksums of these runs, of those that are whole."""
        found, digest = self._checksums.found, digest_function()
        if digest:
            _digests(self._here.address, first, beyond, self._to, self._whole, self._tensor, digest, found)
            return
        for run in range(first, beyond):
            if self._whole[run]:
                data = self.data[self._to[run] : self._to[run + 1]]
                found[self._tensor[run]] = xxhash.xxh3_64_intdigest(data.data)

    def arrived(self) -> Piece:
        """The words on the device, for kernels that are launched from now on. Others compute the checksums."""
        for share in self._under_way:
            share.result()
        self._checksums.take(self._tensor[self._whole], shared(self._compute, self._to))
        if self._device.type != "cuda":
            return self._here
        side = _side(self._device)
        side.wait_event(self._free)
        with torch.cuda.stream(side):
            self._there.tensor.copy_(self._here.tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return self._there


@compiled
def _copy_bytes(buffer: int, first: int, beyond: int, source: Array, to: Array, whole: Array) -> None:
    """So many of the bytes of all runs, which may begin and end within one. Of whole ones the checksum is left out."""
    run = np.searchsorted(to, first, side="right") - 1
    while first < beyond:
        here, end = first - to[run], min(beyond, to[run + 1])
        if whole[run] and here < _SEALED:
            end = min(end, to[run] + _SEALED)
        skipped = _CHECKSUM if whole[run] and here >= _SEALED else 0
        copy_bytes(buffer + first, source[run] + here + skipped, end - first)
        first = end
        while run + 1 < len(to) and to[run + 1] <= first:
            run += 1


@compiled
def _digests(
    buffer: int, first: int, beyond: int, to: Array, whole: Array, number: Array, digest: int, found: Array
) -> None:
    for run in range(first, beyond):
        if whole[run]:
            found[number[run]] = digest_of(digest, buffer + to[run], to[run + 1] - to[run])
