"""What attention does with eight queries at a time, a lane for each: products of small matrices, and the softmax.

Written in vector instructions, because of loops no compiler makes sums that stay in registers. All take arrays of
float32 and the index in them where something begins, and check nothing. A tile is eight by eight numbers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from rillflow.weights.delta.vectors import I64, LANES, Code, instruction

_HALF = LANES // 2  # rows at once where what they are multiplied with lies in registers too


@instruction
def dots(
    typing: Any,
    left: Any, at: Any, step: Any, right: Any, start: Any, along: Any, count: Any, out: Any, to: Any, width: Any,
) -> Any:  # fmt: skip
    """A tile of the product of two matrices, the first of which is given by columns: in row r and lane c the sum over
    `count` k of `left[at + k * step + r] * right[start + k * along + c]`. Its rows are `width` apart in `out`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder, signature, args)
        sums = [code.variable(0.0) for _ in range(LANES)]
        with code.turns(args[6], 1) as (k, _):
            column = code.load(0, builder.add(args[1], builder.mul(k, args[2])))
            row = code.load(3, builder.add(args[4], builder.mul(k, args[5])))
            for r, total in enumerate(sums):
                builder.store(code.product_plus(code.lane(column, r), row, builder.load(total)), total)
        for r, total in enumerate(sums):
            code.store(builder.load(total), 7, code.place(args[8], args[9], r))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(left, whole, whole, right, whole, whole, whole, out, whole, whole), generate


@instruction
def add_outer(
    typing: Any, left: Any, at: Any, right: Any, start: Any, along: Any, out: Any, to: Any, width: Any
) -> Any:
    """Add to a tile the product of two matrices: to row r and lane c the sum over eight k of
    `left[at + 8 * r + k] * right[start + k * along + c]`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder, signature, args)
        for half in (0, _HALF):
            rows = range(half, half + _HALF)
            factors = [code.load(0, args[1], LANES * r) for r in rows]
            places = [code.place(args[6], args[7], r) for r in rows]
            sums = [code.load(5, place) for place in places]
            for k in range(LANES):
                row = code.load(2, code.place(args[3], args[4], k))
                sums = [
                    code.product_plus(code.lane(factor, k), row, total)
                    for factor, total in zip(factors, sums, strict=True)
                ]
            for total, place in zip(sums, places, strict=True):
                code.store(total, 5, place)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(left, whole, right, whole, whole, out, whole, whole), generate


@instruction
def soften(typing: Any, scores: Any, count: Any, tops: Any, sums: Any) -> Any:
    """Turn `count` scores of each query into powers of two below the highest of them; the highest, and the sums."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, zero = Code(context, builder, signature, args), ir.Constant(I64, 0)
        end = builder.mul(args[1], ir.Constant(I64, LANES))
        tops = code.variable(float("-inf"))
        with code.turns(end, LANES) as (at, _):
            loaded = code.load(0, at)
            higher = builder.fcmp_ordered(">", loaded, builder.load(tops))  # what is no number makes the sum none
            builder.store(builder.select(higher, loaded, builder.load(tops)), tops)
        top, sums = builder.load(tops), code.variable(0.0)
        with code.turns(end, LANES) as (at, _):
            power = code.power_of_two(builder.fsub(code.load(0, at), top))
            code.store(power, 0, at)
            builder.store(builder.fadd(builder.load(sums), power), sums)
        code.store(top, 2, zero)
        code.store(builder.load(sums), 3, zero)
        return context.get_dummy_value()

    return types.void(scores, types.int64, tops, sums), generate


@instruction
def slope(typing: Any, scores: Any, pulls: Any, count: Any, totals: Any, means: Any) -> Any:
    """Turn `count` scores of each query into their weights, given the logarithms (of base 2) of the sums of all; and
    what pulls at each weight into what pulls at its score, given the means of these pulls."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, zero = Code(context, builder, signature, args), ir.Constant(I64, 0)
        total, mean = code.load(3, zero), code.load(4, zero)
        with code.turns(builder.mul(args[2], ir.Constant(I64, LANES)), LANES) as (at, _):
            weight = code.power_of_two(builder.fsub(code.load(0, at), total))
            code.store(weight, 0, at)
            code.store(builder.fmul(weight, builder.fsub(code.load(1, at), mean)), 1, at)
        return context.get_dummy_value()

    return types.void(scores, pulls, types.int64, totals, means), generate
