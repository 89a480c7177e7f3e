"""The bytes of a batch of segments on their way to the device, and their checksums."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache

import numpy as np
import torch
import xxhash

from rillflow.weights.delta.format import HEADER_SIZE
from rillflow.weights.delta.gpu import heads
from rillflow.weights.delta.gpu.batch import Array, Spans
from rillflow.weights.delta.gpu.memory import copy_bytes, digest_function, digest_of
from rillflow.weights.delta.gpu.threads import shared
from rillflow.weights.delta.jit import compiled

_CHECKSUM, _SEALED = heads.CHECKSUM, heads.SEALED


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """What copies to the device while its kernels run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Incoming:
    """Bytes that other threads copy to memory which the device can read, and the device then to its own.

    Of a tensor that is in this batch alone, that is the whole delta without its checksum, which is computed from what
    was copied, while it is in the cache. Of others it is from their first segment here to the last that has bytes.

    `data` are whole words, and one more than there are; `begin` is where each segment's bytes begin in them. Nothing is
    in them before `arrived` was called. The memory on the device is there at once, so that the copy need not wait for
    kernels that are launched in between.
    """

    def __init__(
        self, deltas: heads.Deltas, checksums: heads.Checksums, some: Spans, begin: Array, size: Array,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._deltas, self._checksums, self._device = deltas, checksums, device
        first, beyond = np.array(some.runs(), np.int64).T
        self._tensor, before = some.tensor[first], begin[first]
        length = deltas.length[self._tensor]
        self._whole = (some.start[first] == 0) & (begin[beyond - 1] + size[beyond - 1] == length)
        self._from = deltas.address[self._tensor] + np.where(self._whole, 0, before)
        last = np.maximum.reduceat(np.where(size > 0, begin + size, 0), first)
        sizes = np.where(self._whole, length - _CHECKSUM, np.maximum(last - before, 0))
        self._to = np.append(0, np.cumsum(sizes))
        moved = self._to[:-1] - np.where(self._whole, _CHECKSUM, before)
        self.begin = begin + np.repeat(moved, beyond - first)
        self._buffer = torch.empty(int(self._to[-1]) // 4 + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.data: Array = self._buffer.numpy().view(np.uint8)
        self.data[-8:] = 0
        if device.type == "cuda":
            # Whatever used this memory before is done when this event is.
            self._there = torch.empty(len(self._buffer), dtype=torch.int32, device=device)
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free.record()
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        """Copy, and let other threads copy."""
        self._under_way = shared(self._copy, self._to)
        self._checksums.take(self._tensor[self._whole], self._under_way)

    def _copy(self, first: int, beyond: int) -> None:
        """The bytes of these runs, and the checksums of those that are whole."""
        found, digest = self._checksums.found, digest_function()
        _copy_runs(
            self._buffer.data_ptr(), first, beyond, self._from, self._to, self._whole, self._tensor, digest, found
        )
        if not digest:
            for run in range(first, beyond):
                if self._whole[run]:
                    data = self.data[self._to[run] : self._to[run + 1]]
                    found[self._tensor[run]] = xxhash.xxh3_64_intdigest(data.data)

    def arrived(self) -> torch.Tensor:
        """The words on the device, for kernels that are launched from now on."""
        for share in self._under_way:
            share.result()
        if self._device.type != "cuda":
            return self._buffer
        side = _side(self._device)
        side.wait_event(self._free)
        with torch.cuda.stream(side):
            self._there.copy_(self._buffer, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return self._there


@compiled
def _copy_runs(
    buffer: int, first: int, beyond: int, source: Array, to: Array, whole: Array, number: Array, digest: int,
    found: Array,
) -> None:  # fmt: skip
    for run in range(first, beyond):
        at, size = buffer + to[run], to[run + 1] - to[run]
        if not whole[run]:
            copy_bytes(at, source[run], size)
            continue
        copy_bytes(at, source[run], _SEALED)
        copy_bytes(at + _SEALED, source[run] + HEADER_SIZE, size - _SEALED)
        if digest:
            found[number[run]] = digest_of(digest, at, size)
