"""The passes of attention over one kv head's keys and values, eight numbers at a time, as instructions of LLVM.

Written out because no compiler makes them of loops: sums stay in registers from the first key to the last, the queries
of a kv head share what is loaded, and the exponential is a polynomial instead of a call for each number.

All take memory of float32, as an array or as an address, and the index in it where something begins, and check nothing.
Head sizes are multiples of LANES. What is not finite gives what is not finite.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from rillflow.weights.delta.vectors import I64, LANES, Code, everywhere, instruction, same

_BLOCK = 4  # keys at once: as many sums become one vector
_SUMS = 8  # vectors of sums at once: half of the registers of AVX or NEON; with more, they are moved about


@instruction
def move(typing: Any, source: Any, at: Any, target: Any, to: Any, size: Any) -> Any:
    """Copy one head."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder, signature, args)
        for lane in range(0, size.literal_value, LANES):
            code.store(code.load(0, args[1], lane), 2, code.plus(args[3], lane))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, size), generate


@instruction
def score(
    typing: Any,
    queries: Any, query: Any, cache: Any, key: Any, count: Any, scores: Any, span: Any, group: Any, size: Any,
) -> Any:  # fmt: skip
    """The products of `group` queries with `count` keys: of query g from `scores[g * span]` on.

    Up to three more are written behind them: a block that is not full takes the last key again.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder, signature, args)
        last = code.plus(args[4], -1)
        with code.turns(args[4], _BLOCK) as (first, _):
            keys = []
            for number in range(_BLOCK):
                at = code.plus(first, number)
                at = builder.select(builder.icmp_signed("<", at, last), at, last)
                keys.append(code.row(args[3], at, size.literal_value))
            for two in range(0, group.literal_value, 2):  # more at once would not fit into the registers
                members = range(two, min(two + 2, group.literal_value))
                sums = [[same(0.0)] * _BLOCK for _ in members]
                for lane in range(0, size.literal_value, LANES):
                    loaded = [code.load(2, at, lane) for at in keys]
                    for member, own in zip(members, sums, strict=True):
                        asked = code.load(0, args[1], member * size.literal_value + lane)
                        own[:] = [code.product_plus(one, asked, more) for one, more in zip(loaded, own, strict=True)]
                for member, own in zip(members, sums, strict=True):
                    a, b, c, d = (code.folded(one) for one in own)
                    found = code.halves(code.halves(a, b), code.halves(c, d))
                    begin = builder.mul(args[6], ir.Constant(I64, member))
                    code.store(found, 5, builder.add(begin, first))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(queries, whole, cache, whole, whole, scores, whole, group, size), generate


@instruction
def soften(typing: Any, scores: Any, at: Any, count: Any, scale: Any) -> Any:
    """Turn `count` scores, times `scale`, into powers of two below the highest one; their sum.

    Eight numbers behind them are overwritten, by some that add nothing to the sum.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder, signature, args)
        code.store(same(float("-inf")), 0, builder.add(args[1], args[2]))
        tops = code.variable(float("-inf"))
        with code.turns(args[2], LANES) as (first, _):
            loaded = code.load(0, builder.add(args[1], first))
            higher = builder.fcmp_ordered(">", loaded, builder.load(tops))
            builder.store(builder.select(higher, loaded, builder.load(tops)), tops)
        top, *others = code.lanes(builder.load(tops))
        for other in others:
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
        top, scaled, sums = everywhere(builder, top), everywhere(builder, args[3]), code.variable(0.0)
        with code.turns(args[2], LANES) as (first, _):
            place = builder.add(args[1], first)
            below = builder.fmul(builder.fsub(code.load(0, place), top), scaled)
            power = code.power_of_two(below)
            code.store(power, 0, place)
            builder.store(builder.fadd(builder.load(sums), power), sums)
        a, b, c, d = code.lanes(code.folded(builder.load(sums)))
        return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

    return types.float32(scores, types.int64, types.int64, types.float32), generate


@instruction
def weigh(
    typing: Any,
    weights: Any, span: Any, shares: Any, cache: Any, value: Any, count: Any, out: Any, at: Any, group: Any, size: Any,
) -> Any:  # fmt: skip
    """The sums of `count` values, for each g of the group by the weights from `weights[g * span]` on, times
    `shares[g]`, one after the other into `out`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder, signature, args)
        vectors = size.literal_value // LANES
        wide = max(number for number in range(1, _SUMS + 1) if vectors % number == 0)
        each = _SUMS // wide
        for first in range(0, group.literal_value, each):
            members = range(first, min(first + each, group.literal_value))
            begins = [builder.mul(args[1], ir.Constant(I64, member)) for member in members]
            for lane in range(0, size.literal_value, wide * LANES):
                sums = [[code.variable(0.0) for _ in range(wide)] for _ in members]
                with code.turns(args[5], 1) as (number, _):
                    row = code.row(args[4], number, size.literal_value)
                    loaded = [code.load(3, row, lane + vector * LANES) for vector in range(wide)]
                    for begin, own in zip(begins, sums, strict=True):
                        weight = code.scalar(0, builder.add(begin, number))
                        for one, total in zip(loaded, own, strict=True):
                            builder.store(code.product_plus(one, weight, builder.load(total)), total)
                for member, own in zip(members, sums, strict=True):
                    share = code.scalar(2, ir.Constant(I64, member))
                    for vector, total in enumerate(own):
                        place = code.plus(args[7], member * size.literal_value + lane + vector * LANES)
                        code.store(builder.fmul(builder.load(total), share), 6, place)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(weights, whole, shares, cache, whole, whole, out, whole, group, size), generate
