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
from rillflow.weights.delta.jit import holding

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_DIGEST = ir.FunctionType(_I64, [_I8.as_pointer(), _I64])


def addresses(views: Sequence[memoryview]) -> tuple[Array, Array]:
    """Where the bytes of views are, and how many each has. TypeError for views that are not one run of bytes."""
    found = np.empty((2, len(views)), np.int64)
    if not _addresses(*_functions(), np.fromiter(map(id, views), np.int64, len(views)), found):
        raise TypeError("the bytes of a view are not in one run")
    return found[0], found[1]


@cache
def _functions() -> tuple[int, int, int]:
    """Addresses of functions of the interpreter, for `_addresses`."""
    api = ctypes.pythonapi
    functions = (api.PyObject_GetBuffer, api.PyBuffer_Release, api.PyErr_Clear)
    get, release, clear = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return get, release, clear


@holding
def _addresses(get: int, release: int, clear: int, objects: Array, found: Array) -> bool:
    # A Py_buffer, whose first numbers are the address, the object and the length, is 80 bytes.
    view = np.zeros(16, np.int64)
    for number in range(len(objects)):
        if not buffer_of(get, release, clear, objects[number], view.ctypes.data):
            return False
        found[0, number], found[1, number] = view[0], view[2]
    return True


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
def buffer_of(typing: Any, get: Any, release: Any, clear: Any, object: Any, view: Any) -> Any:
    """Fill in the Py_buffer at the address `view` with what the object shows of its memory, and give it back: the
    object keeps the memory. Whether it shows any; if not, no error is left behind."""
    pointer, integer, nothing = _I8.as_pointer(), ir.IntType(32), ir.VoidType()

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        getting = ir.FunctionType(integer, [pointer, pointer, integer])
        releasing, clearing = ir.FunctionType(nothing, [pointer]), ir.FunctionType(nothing, [])
        get, release, clear = (
            builder.inttoptr(address, kind.as_pointer())
            for address, kind in zip(args, (getting, releasing, clearing), strict=False)
        )
        object, view = _pointer(builder, args[3]), _pointer(builder, args[4])
        good = builder.icmp_signed("==", builder.call(get, [object, view, integer(0)]), integer(0))
        with builder.if_else(good) as (then, otherwise):
            with then:
                builder.call(release, [view])
            with otherwise:
                builder.call(clear, [])
        return good

    return types.boolean(types.int64, types.int64, types.int64, types.int64, types.int64), generate


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
