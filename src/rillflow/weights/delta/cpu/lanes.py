"""64 weights at a time: what compilers do not make of loops by themselves, as vector instructions of LLVM.

All take an array and the index of the first of 64 (of `exponents_of`: 16) items that must be inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rillflow.weights.delta.jit import inlined

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_LANES = 16
_1 = np.uint64(1)
SPARE = 4
_BYTES = ir.VectorType(_I8, _LANES)


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled functions call by the arguments without the first."""
    return cast(Callable[..., Any], intrinsic(function))


def _constant(values: Sequence[int], item: ir.Type) -> ir.Constant:
    return ir.Constant(ir.VectorType(item, len(values)), list(values))


def _everywhere(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of 16 times the same."""
    empty = ir.Constant(ir.VectorType(value.type, _LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, _constant([0] * _LANES, _I32))


def _pointer(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, first: ir.Value, row: int) -> ir.Value:
    """To the 16 items of `array` that begin 16 * `row` after `first`."""
    at = builder.add(first, ir.Constant(_I64, _LANES * row))
    item = context.get_data_type(kind.dtype)
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.VectorType(item, _LANES).as_pointer())


def _load(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, first: ir.Value, row: int = 0) -> ir.Value:
    return builder.load(_pointer(context, builder, kind, array, first, row), align=1)


def _pair_sums(builder: ir.IRBuilder, one: ir.Value, two: ir.Value) -> ir.Value:
    """Sums of neighbours: a vector of 16 of two of 16."""
    even, odd = (_constant(range(start, 2 * _LANES, 2), _I32) for start in (0, 1))
    return builder.add(builder.shuffle_vector(one, two, even), builder.shuffle_vector(one, two, odd))


def _bits(builder: ir.IRBuilder, flags: Sequence[ir.Value]) -> ir.Value:
    """A bit for each of 64 flags: each byte's share of its byte of the result, summed by eights."""
    share = _constant([1 << lane % 8 for lane in range(_LANES)], _I8)
    a, b, c, d = (builder.and_(builder.sext(flag, _BYTES), share) for flag in flags)
    fours = _pair_sums(builder, _pair_sums(builder, a, b), _pair_sums(builder, c, d))
    even, odd = (_constant(range(start, _LANES, 2), _I32) for start in (0, 1))
    eights = builder.add(builder.shuffle_vector(fours, fours, even), builder.shuffle_vector(fours, fours, odd))
    return builder.bitcast(eights, _I64)


@_instruction
def differing(typing: Any, old: Any, new: Any, first: Any) -> Any:
    """A bit for each weight that is not the same in both."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pairs = [[_load(context, builder, old, args[side], args[2], row) for side in (0, 1)] for row in range(4)]
        return _bits(builder, [builder.icmp_unsigned("!=", a, b) for a, b in pairs])

    return types.uint64(old, old, types.int64), generate


@_instruction
def exponents_of(typing: Any, weights: Any, first: Any, mantissa: Any, mask: Any, out: Any, at: Any) -> Any:
    """Write the exponents of 16 weights into the bytes `out` from `at` on."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        shift = builder.trunc(args[2], context.get_data_type(weights.dtype))
        shifted = builder.lshr(_load(context, builder, weights, args[0], args[1]), _everywhere(builder, shift))
        kept = _everywhere(builder, builder.trunc(args[3], _I8))
        found = builder.and_(builder.trunc(shifted, _BYTES), kept)
        builder.store(found, _pointer(context, builder, out, args[4], args[5], 0), align=1)
        return context.get_dummy_value()

    return types.void(weights, types.int64, types.int64, types.int64, out, types.int64), generate


@_instruction
def at_least(typing: Any, exponents: Any, first: Any, low: Any) -> Any:
    """How many of 64 bytes are not below `low`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        limit = _everywhere(builder, args[2])
        total = ir.Constant(_BYTES, [0] * _LANES)
        for row in range(4):
            loaded = _load(context, builder, exponents, args[0], args[1], row)
            total = builder.sub(total, builder.sext(builder.icmp_unsigned(">=", loaded, limit), _BYTES))
        summed = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, ir.FunctionType(_I8, [_BYTES]), "llvm.vector.reduce.add.v16i8"
        )
        return builder.zext(builder.call(summed, [total]), _I64)

    return types.int64(exponents, types.int64, types.uint8), generate


@_instruction
def members(typing: Any, exponents: Any, first: Any, low: Any, span: Any) -> Any:
    """A bit for each of 64 bytes that is at least `low` and at most `low + span`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        low, span = (_everywhere(builder, value) for value in args[2:])
        loaded = [_load(context, builder, exponents, args[0], args[1], row) for row in range(4)]
        return _bits(builder, [builder.icmp_unsigned("<=", builder.sub(value, low), span) for value in loaded])

    return types.uint64(exponents, types.int64, types.uint8, types.uint8), generate


@_instruction
def ones(typing: Any, word: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@_instruction
def lowest(typing: Any, word: Any) -> Any:
    """The place of the lowest bit that is set; 64 where none is."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@_instruction
def highest(typing: Any, word: Any) -> Any:
    """The place of the highest bit that is set, floor(log2), of a number that is not 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(_I64, 63), zeros)

    return types.int64(types.uint64), generate


@inlined
def places(bits: Any, start: int, out: Any, at: Any) -> Any:
    """Write where bits are set, counted from `start`, into `out` from `at` on; the index behind them. Some items
    behind that are written too, up to SPARE: that takes less time than to find out."""
    if not bits:
        return at
    end = at + ones(bits)
    while bits:
        for _ in range(SPARE):
            out[at] = start + lowest(bits)
            bits &= bits - _1
            at += 1
    return end
