"""A small language of expressions: Python's syntax, none of its reach.

Only what is named here can be written: there are no attributes, no calls but of `FUNCTIONS`, no assignment and no
text arithmetic, so an expression can neither leave its values nor grow without bound. What it costs is bounded twice:
its size when it is read, its steps when it is evaluated; whatever goes through a list or a text counts as more
steps the longer it is. Powers are taken in floats, so they overflow, and whole numbers have a bound.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rillflow.dataflow.hooks.options import nearest
from rillflow.errors import ConfigError

LONGEST_TEXT = 1000
MOST_NODES = 200
MOST_STEPS = 100_000
HIGHEST_EXPONENT = 64
MOST_BITS = 1024  # of a whole number
_VALUES_A_STEP, _CHARACTERS_A_STEP = 16, 1024  # that Python goes through in about the time of a step


def _std(values: Iterable[float]) -> float:
    """Of the whole population, as the group's statistics are."""
    known = list(values)
    mean = fmean(known)
    return math.sqrt(fmean([(value - mean) ** 2 for value in known]))


def _sum(values: Iterable[float]) -> float:
    return sum(map(_number, values))


def _round(value: float, digits: int = 0) -> float:
    return round(float(value), digits) if digits else round(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mean": fmean,
    "std": _std,
    "min": min,
    "max": max,
    "sum": _sum,
    "len": len,
    "any": any,
    "all": all,
    "abs": abs,
    "round": _round,
}


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > HIGHEST_EXPONENT:
        raise ValueError(f"the exponent {exponent} is above {HIGHEST_EXPONENT}")
    return math.pow(base, exponent)


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_ALLOWED = (
    *(ast.BoolOp, ast.And, ast.Or, ast.BinOp, *_ARITHMETIC, ast.UnaryOp, *_SIGNS, ast.Compare, *_COMPARISONS),
    *(ast.IfExp, ast.Call, ast.Name, ast.Load, ast.Store, ast.Constant, ast.List, ast.Tuple, ast.Subscript),
    *(ast.GeneratorExp, ast.ListComp, ast.comprehension),
)


class Expression:
    """An expression over `names`, checked when it is made; a ConfigError names the place of what is wrong."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self._text = text.strip()
        self._root = self._parse()
        nodes = list(ast.walk(self._root))
        if len(nodes) > MOST_NODES:
            raise self._wrong(self._root, f"it has {len(nodes)} parts; {MOST_NODES} are allowed")
        for node in nodes:
            self._check(node)
        self._check_names(self._root, frozenset(names))

    def value(self, values: Mapping[str, Any]) -> Any:
        """Its value where `values` has all the names; what Python would raise is raised."""
        return _Evaluation(values).value(self._root)

    # ------------------------------------------------------------ reading

    def _parse(self) -> ast.expr:
        if len(self._text) > LONGEST_TEXT:
            raise ConfigError(
                f"the expression has {len(self._text)} characters; {LONGEST_TEXT} are allowed",
                "write a filter class and name it as file.py:Class",
            )
        try:
            return ast.parse(self._text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = getattr(error, "offset", None) or len(self._text)
            message = getattr(error, "msg", str(error))
            raise ConfigError(
                f"expression {self._text!r:.200}, column {column}: {message}", "for example: mean(rewards) < 0.9"
            ) from None

    def _wrong(self, node: ast.AST, message: str) -> ConfigError:
        column = getattr(node, "col_offset", 0) + 1
        part = ast.get_source_segment(self._text, node) or ""
        return ConfigError(
            f"expression {self._text!r:.200}, column {column}: {part[:40]!r}: {message}",
            "allowed are comparisons, and/or/not, arithmetic, indexing, `for` inside of a call and "
            f"{', '.join(FUNCTIONS)}",
        )

    def _check(self, node: ast.AST) -> None:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name not in FUNCTIONS:
                raise self._wrong(
                    node, f"there is no function of this name; {nearest(name, FUNCTIONS)}known: {', '.join(FUNCTIONS)}"
                )
            case ast.Call(func=func, keywords=keywords) if keywords or not isinstance(func, ast.Name):
                raise self._wrong(node, "only functions by their name, without keywords, can be called")
            case ast.Constant(value=value) if not isinstance(value, str | int | float | None):
                raise self._wrong(node, "only numbers and text are allowed")
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int() | float() as exponent)):
                if abs(exponent) > HIGHEST_EXPONENT:
                    raise self._wrong(node, f"exponents up to {HIGHEST_EXPONENT} are allowed")
            case ast.GeneratorExp(generators=generators) | ast.ListComp(generators=generators):
                if len(generators) > 1 or not isinstance(generators[0].target, ast.Name) or generators[0].is_async:
                    raise self._wrong(node, "one `for name in values` is allowed")
            case _ if not isinstance(node, _ALLOWED):
                raise self._wrong(node, f"{type(node).__name__} is not allowed")

    def _check_names(self, node: ast.AST, known: frozenset[str]) -> None:
        match node:
            case ast.Name(id=name) if name not in known:
                guess = f"did you mean {name}(rewards)? " if name in FUNCTIONS else nearest(name, known)
                raise self._wrong(node, f"there is no value of this name; {guess}known: {', '.join(sorted(known))}")
            case ast.Call(args=arguments):
                for argument in arguments:
                    self._check_names(argument, known)
            case ast.GeneratorExp(elt=element, generators=[loop]) | ast.ListComp(elt=element, generators=[loop]):
                assert isinstance(loop.target, ast.Name)
                self._check_names(loop.iter, known)
                if loop.target.id in known or loop.target.id in FUNCTIONS:
                    raise self._wrong(loop.target, "this name is taken")
                for part in (element, *loop.ifs):
                    self._check_names(part, known | {loop.target.id})
            case _:
                for child in ast.iter_child_nodes(node):
                    self._check_names(child, known)


class _Evaluation:
    """One evaluation, of at most `MOST_STEPS` steps."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._steps = 0

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise ValueError(f"the expression takes more than {MOST_STEPS} steps")

    def value(self, node: ast.expr) -> Any:
        self._spend(1)
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._values[node.id]
            case ast.List() | ast.Tuple():
                return self._sized([self.value(each) for each in node.elts])
            case ast.Call(func=ast.Name(id=name)):
                return FUNCTIONS[name](*(self._sized(self.value(each)) for each in node.args))
            case ast.GeneratorExp() | ast.ListComp():
                return self._each(node.elt, node.generators[0])
            case _:
                return self._operation(node)

    def _operation(self, node: ast.expr) -> Any:
        match node:
            case ast.BoolOp():
                ends = isinstance(
                    node.op, ast.Or
                )  # `or` ends at the first that is true, `and` at the first that is not
                result: Any = None
                for each in node.values:
                    result = self.value(each)
                    if bool(result) == ends:
                        break
                return result
            case ast.Subscript():
                return self.value(node.value)[self.value(node.slice)]
            case ast.IfExp():
                return self.value(node.body if self.value(node.test) else node.orelse)
            case ast.UnaryOp():
                return _SIGNS[type(node.op)](self.value(node.operand))
            case ast.BinOp():
                return _ARITHMETIC[type(node.op)](_number(self.value(node.left)), _number(self.value(node.right)))
            case ast.Compare():
                return self._compare(node)
        raise AssertionError(ast.dump(node))

    def _sized(self, value: Any) -> Any:
        """The value, all that lies in it counted: lists may share parts, so they can hold far more than was made."""
        if isinstance(value, str):
            self._spend(len(value) // _CHARACTERS_A_STEP)
        elif isinstance(value, Sequence | Mapping):
            self._spend(1 + len(value) // _VALUES_A_STEP)
            for each in value.values() if isinstance(value, Mapping) else value:
                if not isinstance(each, int | float):
                    self._sized(each)
        return value

    def _compare(self, node: ast.Compare) -> bool:
        left = self._sized(self.value(node.left))
        for comparison, each in zip(node.ops, node.comparators, strict=True):
            right = self._sized(self.value(each))
            if not _COMPARISONS[type(comparison)](left, right):
                return False
            left = right
        return True

    def _each(self, element: ast.expr, loop: ast.comprehension) -> list[Any]:
        assert isinstance(loop.target, ast.Name)
        found = []
        for item in self._sized(self.value(loop.iter)):
            self._values[loop.target.id] = item
            if all(self.value(condition) for condition in loop.ifs):
                found.append(self._sized(self.value(element)))
        return found


def _number(value: Any) -> float:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"a whole number of more than {MOST_BITS} bits")
    if isinstance(value, int | float):
        return value
    raise TypeError(f"arithmetic needs numbers, not {type(value).__name__}")
