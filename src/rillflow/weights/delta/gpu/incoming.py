"""The bytes of a batch of segments on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from rillflow.weights.delta.gpu import heads
from rillflow.weights.delta.gpu.batch import Array, Spans


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """What copies to the device while its kernels run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Incoming:
    """Bytes that other threads copy to memory which the device can read, and the device then to its own.

    `data` are whole words, and one more than there are; `begin` is where each segment's bytes begin in them. Nothing is
    in them before `arrived` was called. The memory on the device is there at once, so that the copy need not wait for
    kernels that are launched in between.
    """

    def __init__(self, views: Sequence[memoryview], some: Spans, begin: Array, size: Array, device: torch.device):
        self._views, self._device = views, device
        runs = np.array(some.runs(), np.int64).reshape(-1, 2)
        first, beyond = runs[:, 0], runs[:, 1]
        self._tensor = some.tensor[first]
        self._from = begin[first]
        # One run for all segments of a tensor and the heads between them; none where they have no bytes.
        length = np.maximum.reduceat(np.where(size > 0, begin + size, 0), first) if len(first) else first
        length = np.maximum(length - self._from, 0)
        self._to = np.append(0, np.cumsum(length))
        self.begin = begin + np.repeat(self._to[:-1] - self._from, beyond - first)
        total = int(self._to[-1])
        self._buffer = torch.empty(total // 4 + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._buffer[-2:] = 0
        self.data: Array = self._buffer.numpy().view(np.uint8)
        if device.type == "cuda":
            # Whatever used this memory before is done when this event is.
            self._there = torch.empty(len(self._buffer), dtype=torch.int32, device=device)
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._free.record()
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        """Copy few bytes here and now, let other threads copy many."""
        total = int(self._to[-1])
        if total < heads.MANY:
            self._copy(0, total)
        else:
            bounds = [total * k // heads.THREADS for k in range(heads.THREADS + 1)]
            self._under_way = [heads.pool().submit(self._copy, *share) for share in pairwise(bounds)]

    def _copy(self, start: int, end: int) -> None:
        """The bytes of the batch from `start` to `end`."""
        run = int(np.searchsorted(self._to, start, "right")) - 1
        while start < end:
            stop = min(int(self._to[run + 1]), end)
            if start < stop:
                source = int(self._from[run] + start - self._to[run])
                view = self._views[self._tensor[run]]
                self.data[start:stop] = np.frombuffer(view, np.uint8, stop - start, source)
            start, run = stop, run + 1

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
