"""Launches that cost the host little. Triton looks at every argument of every launch, to find what it has compiled for
such arguments; that takes longer than the launch. Here, what was compiled for a kernel's constants is kept.

So nothing else may make a difference: pointers are those of pieces of a room, whose alignment and, given the constants,
type are always the same; numbers have 32 bits and are arguments that the kernel is not specialized on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton

from rillflow.weights.delta.gpu.room import Piece

# Of other versions it is not known how a compiled kernel is launched: there Triton does it, and in its interpreter.
_KEPT = triton.__version__.startswith("3.6.") and os.environ.get("TRITON_INTERPRET") != "1"


class Kernel:
    """A kernel with its constants, which are the last of its arguments, and options of the compiler."""

    def __init__(self, function: Any, constants: dict[str, int]) -> None:
        self._function, self._constants = function, constants
        self._last = [constants[name] for name in function.arg_names if name in constants]
        self._compiled: dict[int, tuple[Callable[..., None], int, Any]] = {}
        self._types: list[Any] | None = None

    def __call__(self, grid: tuple[int, ...], *arguments: Piece | int) -> None:
        """Launch so many programs, in one or two dimensions, on the current stream."""
        if not _KEPT:
            self._plain(grid, arguments)
            return
        device = torch._C._cuda_getDevice()
        compiled = self._compiled.get(device)
        if compiled is None:
            made = self._plain(grid, arguments)
            self._compiled[device] = made.run, made.function, made.packed_metadata
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(device)
        rows = grid[1] if len(grid) > 1 else 1
        found = [one.address if type(one) is Piece else one for one in arguments]
        run(grid[0], rows, 1, stream, function, metadata, None, None, None, *found, *self._last)

    def _plain(self, grid: tuple[int, ...], arguments: tuple[Piece | int, ...]) -> Any:
        self._check(arguments)
        found = [one.tensor if isinstance(one, Piece) else one for one in arguments]
        return self._function[grid](*found, **self._constants)

    def _check(self, arguments: tuple[Piece | int, ...]) -> None:
        """That what is not looked at when compiled kernels are launched is as this module says."""
        types = [one.dtype if isinstance(one, Piece) else int for one in arguments]
        assert self._types in (None, types), f"{self._function} has had {self._types} and now has {types}"
        self._types = types
        told = getattr(self._function, "kwargs", {}).get("do_not_specialize")
        free = told or getattr(self._function, "do_not_specialize", None) or []
        for name, one in zip(self._function.arg_names, arguments, strict=False):
            assert isinstance(one, Piece) or name in free, f"{self._function} is specialized on {name}"


_kernels: dict[tuple[Any, ...], Kernel] = {}


def kernel(function: Any, **constants: int) -> Kernel:
    """The kernel with these constants, always the same one."""
    key = (id(function), *constants.items())
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = Kernel(function, constants)
    return found
