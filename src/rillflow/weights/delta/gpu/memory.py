"""Bytes of buffers by their addresses, for compiled loops: other threads can use the interpreter meanwhile.

Buffers must live as long as their addresses are used, and who calls must know that what is asked for is inside of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rillflow.weights.delta.gpu.batch import Array

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_DIGEST = ir.FunctionType(_I64, [_I8.as_pointer(), _I64])


def addresses(views: Sequence[memoryview]) -> Array:
    """Of buffers that are not empty."""
    found = (np.frombuffer(view, np.uint8).__array_interface__["data"][0] for view in views)
    return np.fromiter(found, np.int64, len(views))


@cache
def digest_function() -> int:
    """The address of the function that computes a checksum; 0 where the module that has it does not show it."""
    try:
        function = ctypes.CDLL(import_module("xxhash._xxhash").__file__).XXH3_64bits
    except (ImportError, OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled functions call by the arguments without the first."""
    return cast(Callable[..., Any], intrinsic(function))


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, _I8.as_pointer())


@_instruction
def byte_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.zext(builder.load(_pointer(builder, args[0]), align=1), _I64)

    return types.int64(types.int64), generate


@_instruction
def copy_bytes(typing: Any, to: Any, source: Any, size: Any) -> Any:
    """To an address from another, which do not overlap."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        to, source = (_pointer(builder, address) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_instruction
def digest_of(typing: Any, function: Any, address: Any, size: Any) -> Any:
    """The checksum of bytes, by the function at the first address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        function = builder.inttoptr(args[0], _DIGEST.as_pointer())
        return builder.call(function, [_pointer(builder, args[1]), args[2]])

    return types.uint64(types.int64, types.int64, types.int64), generate
