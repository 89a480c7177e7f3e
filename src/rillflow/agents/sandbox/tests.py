"""The kinds of tests. Only `Cases` and `Pairs` are fit for tests that a model wrote: they hold values, not code."""

from __future__ import annotations

import ast
import re
from typing import Any

import msgspec

_LINES, _LINE = 1000, 4000  # what a model wrote is read here, so it is bounded
_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Asserts(msgspec.Struct, frozen=True):
    """Statements, each one a test, as in MBPP. They are code: their author is trusted."""

    tests: tuple[str, ...]
    setup: str = ""


class Check(msgspec.Struct, frozen=True):
    """A function `check(candidate)`, as in HumanEval: one test. It is code: its author is trusted."""

    test: str
    entry_point: str


class Case(msgspec.Struct, frozen=True):
    """A call and what it has to return."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    keywords: dict[str, Any] = {}


class Cases(msgspec.Struct, frozen=True):
    cases: tuple[Case, ...]


class Pairs(msgspec.Struct, frozen=True):
    """Standard input and what a whole program has to write for it; blanks at the ends of lines do not count."""

    pairs: tuple[tuple[str, str], ...]


Tests = Asserts | Check | Cases | Pairs


def literal_cases(text: str) -> Cases:
    """The lines `assert f(literals) == literal` of a text as values; everything else in it is left out."""
    lines = [line.strip() for line in text.splitlines()[:_LINES]]
    found = (_case(line) for line in lines if len(line) <= _LINE)
    return Cases(tuple(case for case in found if case is not None))


def _case(line: str) -> Case | None:
    try:
        (statement,) = ast.parse(line).body
        match statement:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords),
                    ops=[ast.Eq()],
                    comparators=[expected],
                )
            ):
                named = {str(one.arg): ast.literal_eval(one.value) for one in keywords if one.arg is not None}
                if len(named) < len(keywords):
                    return None
                values = tuple(ast.literal_eval(one) for one in arguments)
                return Case(name, values, ast.literal_eval(expected), named)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    return None


def code_of(answer: str) -> str:
    """The program in an answer: the last fenced block that says Python, else the last one, else the whole text."""
    blocks = _FENCE.findall(answer)
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    if python:
        return str(python[-1])
    return str(blocks[-1][1]) if blocks else answer
