"""Vectors of eight floats, as instructions of LLVM: what compiled loops call where no compiler makes them of loops.

Each function made with `instruction` becomes instructions at the place of its call. Memory is of float32, an array or
an address, and nothing is checked. What is not finite gives what is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8  # numbers of a vector: two registers of NEON, one of AVX
I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
_LOWEST = -126.0
# 2 ** x for x from -1/2 to 1/2, within 2e-9 before rounding; from the highest power down.
_POWERS = (1.5353359e-4, 1.3398876e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled functions call by the arguments without the first."""
    return cast(Callable[..., Any], intrinsic(prefer_literal=True)(function))


def same(value: float | int, kind: ir.VectorType = VECTOR) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def everywhere(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of eight times the same."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, same(0, ir.VectorType(I32, LANES)))


class Code:
    """Instructions at the place of a call. Memory is meant by its number among the arguments."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> None:
        self.builder = builder
        self._context = context
        self._args = list(zip(signature.args, args, strict=True))

    def at(self, memory: int, index: ir.Value, kind: ir.Type = VECTOR) -> ir.Value:
        given, value = self._args[memory]
        if isinstance(given, types.Array):
            first = self._context.make_array(given)(self._context, self.builder, value).data
        else:
            first = self.builder.inttoptr(value, FLOAT.as_pointer())
        return self.builder.bitcast(self.builder.gep(first, [index]), kind.as_pointer())

    def load(self, memory: int, index: ir.Value, more: int = 0) -> ir.Value:
        return self.builder.load(self.at(memory, self.plus(index, more)), align=4)

    def scalar(self, memory: int, index: ir.Value) -> ir.Value:
        """One number in all lanes."""
        return everywhere(self.builder, self.builder.load(self.at(memory, index, FLOAT)))

    def store(self, value: ir.Value, memory: int, index: ir.Value) -> None:
        self.builder.store(value, self.at(memory, index, value.type), align=4)

    def plus(self, index: ir.Value, more: int) -> ir.Value:
        return self.builder.add(index, ir.Constant(I64, more))

    def row(self, first: ir.Value, number: ir.Value, size: int) -> ir.Value:
        return self.builder.add(first, self.builder.mul(number, ir.Constant(I64, size)))

    def place(self, first: ir.Value, width: ir.Value, number: int) -> ir.Value:
        """Where row `number` begins, when rows are `width` apart."""
        return self.builder.add(first, self.builder.mul(width, ir.Constant(I64, number)))

    def variable(self, first: float) -> ir.Value:
        """A vector that changes from turn to turn of a loop; it lies in a register."""
        place = cgutils.alloca_once(self.builder, VECTOR)  # type: ignore[no-untyped-call]
        self.builder.store(same(first), place)
        return place

    def turns(self, count: ir.Value, step: int) -> Any:
        """A loop whose index goes from 0 up to `count` by `step`."""
        bounds = (ir.Constant(I64, 0), count, ir.Constant(I64, step))
        return cgutils.for_range_slice(self.builder, *bounds)

    def product_plus(self, one: ir.Value, other: ir.Value, more: ir.Value) -> ir.Value:
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            self.builder.module, kind, f"llvm.fmuladd.v{LANES}f32"
        )
        return self.builder.call(function, [one, other, more])

    def halves(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """Of two vectors the sums of neighbours, as one vector of their size."""
        places = range(2 * one.type.count)
        even, odd = (ir.Constant(ir.VectorType(I32, one.type.count), list(places[start::2])) for start in (0, 1))
        pick = self.builder.shuffle_vector
        return self.builder.fadd(pick(one, other, even), pick(one, other, odd))

    def folded(self, value: ir.Value) -> ir.Value:
        """The sums of the lanes of both halves."""
        low, high = (ir.Constant(ir.VectorType(I32, 4), list(range(start, start + 4))) for start in (0, 4))
        pick = self.builder.shuffle_vector
        return self.builder.fadd(pick(value, value, low), pick(value, value, high))

    def lane(self, value: ir.Value, number: int) -> ir.Value:
        """One of the lanes in all of them."""
        return self.builder.shuffle_vector(value, value, same(number, ir.VectorType(I32, LANES)))

    def lanes(self, value: ir.Value) -> list[ir.Value]:
        return [self.builder.extract_element(value, ir.Constant(I32, lane)) for lane in range(value.type.count)]

    def power_of_two(self, value: ir.Value) -> ir.Value:
        """2 ** value within 2e-7 of itself, for lanes that are below 1/2; 0 where that is less than floats have without
        losing bits."""
        builder, whole = self.builder, ir.VectorType(I32, LANES)
        low = builder.fcmp_ordered("<", value, same(_LOWEST))  # false for what is no number, which stays so
        value = builder.select(low, same(_LOWEST), value)
        nearest = builder.fptosi(builder.fsub(value, same(0.5)), whole)
        rest = builder.fsub(value, builder.sitofp(nearest, VECTOR))
        found = same(_POWERS[0])
        for power in _POWERS[1:]:
            found = self.product_plus(found, rest, same(power))
        exponent = builder.shl(builder.add(nearest, same(127, whole)), same(23, whole))
        return builder.select(low, same(0.0), builder.fmul(found, builder.bitcast(exponent, VECTOR)))
