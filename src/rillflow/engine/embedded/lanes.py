"""The passes of attention over one kv head's keys and values, eight numbers at a time, as instructions of LLVM.

Written out because no compiler makes them of loops: sums stay in registers from the first key to the last, the queries
of a kv head share what is loaded, and the exponential is a polynomial instead of a call for each number.

All take memory of float32, as an array or as an address, and the index in it where something begins, and check nothing.
Head sizes are multiples of LANES. What is not finite gives what is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rillflow.engine.embedded.cache import LANES

_BLOCK = 4  # keys at once: as many sums become one vector
_SUMS = 8  # vectors of sums at once: half of the registers of AVX or NEON; with more, they are moved about

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_LOWEST = -126.0  # of the exponents of two that floats have without losing bits
# 2 ** x for x from -1/2 to 1/2, within 2e-9 before rounding; from the highest power down.
_POWERS = (1.5353359e-4, 1.3398876e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled functions call by the arguments without the first."""
    return cast(Callable[..., Any], intrinsic(prefer_literal=True)(function))


def _same(value: float | int, kind: ir.VectorType = _VECTOR) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _everywhere(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of eight times the same."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, _same(0, ir.VectorType(_I32, LANES)))


class _Code:
    """Instructions at the place of a call. Memory is meant by its number among the arguments."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> None:
        self.builder = builder
        self._context = context
        self._args = list(zip(signature.args, args, strict=True))

    def at(self, memory: int, index: ir.Value, kind: ir.Type = _VECTOR) -> ir.Value:
        given, value = self._args[memory]
        if isinstance(given, types.Array):
            first = self._context.make_array(given)(self._context, self.builder, value).data
        else:
            first = self.builder.inttoptr(value, _FLOAT.as_pointer())
        return self.builder.bitcast(self.builder.gep(first, [index]), kind.as_pointer())

    def load(self, memory: int, index: ir.Value, more: int = 0) -> ir.Value:
        return self.builder.load(self.at(memory, self.plus(index, more)), align=4)

    def scalar(self, memory: int, index: ir.Value) -> ir.Value:
        """One number in all lanes."""
        return _everywhere(self.builder, self.builder.load(self.at(memory, index, _FLOAT)))

    def store(self, value: ir.Value, memory: int, index: ir.Value) -> None:
        self.builder.store(value, self.at(memory, index, value.type), align=4)

    def plus(self, index: ir.Value, more: int) -> ir.Value:
        return self.builder.add(index, ir.Constant(_I64, more))

    def row(self, first: ir.Value, number: ir.Value, size: int) -> ir.Value:
        return self.builder.add(first, self.builder.mul(number, ir.Constant(_I64, size)))

    def variable(self, first: float) -> ir.Value:
        """A vector that changes from turn to turn of a loop; it lies in a register."""
        place = cgutils.alloca_once(self.builder, _VECTOR)  # type: ignore[no-untyped-call]
        self.builder.store(_same(first), place)
        return place

    def turns(self, count: ir.Value, step: int) -> Any:
        """A loop whose index goes from 0 up to `count` by `step`."""
        bounds = (ir.Constant(_I64, 0), count, ir.Constant(_I64, step))
        return cgutils.for_range_slice(self.builder, *bounds)

    def product_plus(self, one: ir.Value, other: ir.Value, more: ir.Value) -> ir.Value:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            self.builder.module, kind, f"llvm.fmuladd.v{LANES}f32"
        )
        return self.builder.call(function, [one, other, more])

    def halves(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """Of two vectors the sums of neighbours, as one vector of their size."""
        places = range(2 * one.type.count)
        even, odd = (ir.Constant(ir.VectorType(_I32, one.type.count), list(places[start::2])) for start in (0, 1))
        pick = self.builder.shuffle_vector
        return self.builder.fadd(pick(one, other, even), pick(one, other, odd))

    def folded(self, value: ir.Value) -> ir.Value:
        """The sums of the lanes of both halves."""
        low, high = (ir.Constant(ir.VectorType(_I32, 4), list(range(start, start + 4))) for start in (0, 4))
        pick = self.builder.shuffle_vector
        return self.builder.fadd(pick(value, value, low), pick(value, value, high))

    def lanes(self, value: ir.Value) -> list[ir.Value]:
        return [self.builder.extract_element(value, ir.Constant(_I32, lane)) for lane in range(value.type.count)]

    def power_of_two(self, value: ir.Value) -> ir.Value:
        """2 ** value within 2e-7 of itself, for lanes that are not positive."""
        builder, whole = self.builder, ir.VectorType(_I32, LANES)
        low = builder.fcmp_ordered("<", value, _same(_LOWEST))  # false for what is no number, which stays so
        value = builder.select(low, _same(_LOWEST), value)
        nearest = builder.fptosi(builder.fsub(value, _same(0.5)), whole)
        rest = builder.fsub(value, builder.sitofp(nearest, _VECTOR))
        found = _same(_POWERS[0])
        for power in _POWERS[1:]:
            found = self.product_plus(found, rest, _same(power))
        exponent = builder.shl(builder.add(nearest, _same(127, whole)), _same(23, whole))
        return builder.fmul(found, builder.bitcast(exponent, _VECTOR))


@_instruction
def move(typing: Any, source: Any, at: Any, target: Any, to: Any, size: Any) -> Any:
    """Copy one head."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = _Code(context, builder, signature, args)
        for lane in range(0, size.literal_value, LANES):
            code.store(code.load(0, args[1], lane), 2, code.plus(args[3], lane))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, size), generate


@_instruction
def score(
    typing: Any,
    queries: Any, query: Any, cache: Any, key: Any, count: Any, scores: Any, span: Any, group: Any, size: Any,
) -> Any:  # fmt: skip
    """The products of `group` queries with `count` keys: of query g from `scores[g * span]` on.

    Up to three more are written behind them: a block that is not full takes the last key again.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = _Code(context, builder, signature, args)
        last = code.plus(args[4], -1)
        with code.turns(args[4], _BLOCK) as (first, _):
            keys = []
            for number in range(_BLOCK):
                at = code.plus(first, number)
                at = builder.select(builder.icmp_signed("<", at, last), at, last)
                keys.append(code.row(args[3], at, size.literal_value))
            for two in range(0, group.literal_value, 2):  # more at once would not fit into the registers
                members = range(two, min(two + 2, group.literal_value))
                sums = [[_same(0.0)] * _BLOCK for _ in members]
                for lane in range(0, size.literal_value, LANES):
                    loaded = [code.load(2, at, lane) for at in keys]
                    for member, own in zip(members, sums, strict=True):
                        asked = code.load(0, args[1], member * size.literal_value + lane)
                        own[:] = [code.product_plus(one, asked, more) for one, more in zip(loaded, own, strict=True)]
                for member, own in zip(members, sums, strict=True):
                    a, b, c, d = (code.folded(one) for one in own)
                    found = code.halves(code.halves(a, b), code.halves(c, d))
                    begin = builder.mul(args[6], ir.Constant(_I64, member))
                    code.store(found, 5, builder.add(begin, first))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(queries, whole, cache, whole, whole, scores, whole, group, size), generate


@_instruction
def soften(typing: Any, scores: Any, at: Any, count: Any, scale: Any) -> Any:
    """Turn `count` scores, times `scale`, into powers of two below the highest one; their sum.

    Eight numbers behind them are overwritten, by some that add nothing to the sum.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = _Code(context, builder, signature, args)
        code.store(_same(float("-inf")), 0, builder.add(args[1], args[2]))
        tops = code.variable(float("-inf"))
        with code.turns(args[2], LANES) as (first, _):
            loaded = code.load(0, builder.add(args[1], first))
            higher = builder.fcmp_ordered(">", loaded, builder.load(tops))
            builder.store(builder.select(higher, loaded, builder.load(tops)), tops)
        top, *others = code.lanes(builder.load(tops))
        for other in others:
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
        top, scaled, sums = _everywhere(builder, top), _everywhere(builder, args[3]), code.variable(0.0)
        with code.turns(args[2], LANES) as (first, _):
            place = builder.add(args[1], first)
            below = builder.fmul(builder.fsub(code.load(0, place), top), scaled)
            power = code.power_of_two(below)
            code.store(power, 0, place)
            builder.store(builder.fadd(builder.load(sums), power), sums)
        a, b, c, d = code.lanes(code.folded(builder.load(sums)))
        return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

    return types.float32(scores, types.int64, types.int64, types.float32), generate


@_instruction
def weigh(
    typing: Any,
    weights: Any, span: Any, shares: Any, cache: Any, value: Any, count: Any, out: Any, at: Any, group: Any, size: Any,
) -> Any:  # fmt: skip
    """The sums of `count` values, for each g of the group by the weights from `weights[g * span]` on, times
    `shares[g]`, one after the other into `out`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = _Code(context, builder, signature, args)
        vectors = size.literal_value // LANES
        wide = max(number for number in range(1, _SUMS + 1) if vectors % number == 0)
        each = _SUMS // wide
        for first in range(0, group.literal_value, each):
            members = range(first, min(first + each, group.literal_value))
            begins = [builder.mul(args[1], ir.Constant(_I64, member)) for member in members]
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
                    share = code.scalar(2, ir.Constant(_I64, member))
                    for vector, total in enumerate(own):
                        place = code.plus(args[7], member * size.literal_value + lane + vector * LANES)
                        code.store(builder.fmul(builder.load(total), share), 6, place)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(weights, whole, shares, cache, whole, whole, out, whole, group, size), generate
