"""Arrays for kernels, many in one piece of memory: to ask for each alone would take the host longer than all else.

Every array begins at a multiple of 256 bytes, so that Triton compiles a kernel once for all of them. What was not
written is anything. The memory is there as long as one of its arrays is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 256
# Much memory is asked for in multiples of this: calls that are alike ask for the same.
_LARGE = 1 << 25
_OF_NUMPY = {torch.uint8: np.uint8, torch.int32: np.int32, torch.int64: np.int64}


class Piece:
    """An array of a room, which can be used as soon as the room is made."""

    __slots__ = ("begin", "dtype", "number", "room")

    def __init__(self, room: Room, begin: int, number: int, dtype: torch.dtype) -> None:
        self.room, self.begin, self.number, self.dtype = room, begin, number, dtype

    def after(self, number: int) -> Piece:
        """What follows so many, which must be a multiple of 16 bytes."""
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
    keep it until they are done (see `batch.in_turns`)."""

    def __init__(self, device: torch.device, *, host: bool = False) -> None:
        self._device, self._pinned = torch.device("cpu") if host else device, host and device.type == "cuda"
        self.size = 0

    def _take(self, number: int, dtype: torch.dtype) -> Piece:
        piece = Piece(self, self.size, number, dtype)
        self.size += -(-number * dtype.itemsize // _ALIGNED) * _ALIGNED
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
        size = max(self.size, _ALIGNED)
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
