"""`calculator`: arithmetic expressions, and nothing else that Python could do.

An expression is parsed into a syntax tree of numbers and operators. Sizes are checked before each operation, so that no
power or product takes long.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from rillflow.agents.tools.functions import tool_of
from rillflow.config.base import Section
from rillflow.contracts import Tool
from rillflow.errors import ToolError

MAX_LENGTH = 1000
MAX_BITS = 4096  # of a whole number
MAX_DIGITS = 400  # of `round`


def _round(number: Any, digits: Any = None) -> Any:
    """Round with bounded digits: for an integer Python computes 10 to their power."""
    if isinstance(digits, int) and abs(digits) > MAX_DIGITS:
        raise OverflowError("round: too many digits")
    return round(number, digits)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "floor", "ceil")},
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(Section):
    """The tool `calculator`. It has no options."""

    async def open(self, timeout: float, stack: AsyncExitStack) -> Tool:
        """Return the tool."""
        return tool_of(calculator, timeout=timeout)


async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (3 + 4) * 2 ** 5 or sqrt(2)."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"not an arithmetic expression: {error}") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(inner))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _binary(sign, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(argument) for argument in arguments)))
    raise ValueError(f"{ast.unparse(node):.60} is not allowed")


def _binary(sign: ast.operator, left: Any, right: Any) -> Any:
    whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(sign, ast.Pow) and whole and right > 0 and left.bit_length() * right > MAX_BITS:
        raise OverflowError("the result is too large")
    return _bounded(_BINARY[type(sign)](left, right))


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError("the number is too large")
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return value
