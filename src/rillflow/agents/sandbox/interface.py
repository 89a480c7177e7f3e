"""The settings, the results and the tests of a sandbox.

Only `Cases` and `Pairs` may hold tests that a model wrote: they are values and not code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from pydantic import Field

from rillflow.agents.sandbox.inside.values import NotPlain, pack
from rillflow.config.base import Positive, Seconds, Section

Status = Literal["ok", "error", "exit", "timeout", "output", "memory", "killed"]


class SandboxConfig(Section):
    """The limits of each run and the size of the pool. A run takes at most `memory` times `processes`, plus `disk`
    twice (its files are in memory)."""

    isolation: Literal["bubblewrap", "process"] = Field(
        "bubblewrap", description="`process` is weaker, only for code that you would run by hand"
    )
    seconds: Seconds = Field(10.0, description="wall time of one run or one grading")
    memory: Positive = Field(512, description="MiB of address space of each process inside")
    output: Positive = Field(65536, description="bytes of output, and of errors; a run that writes more is ended")
    processes: Positive = Field(8, description="processes and threads inside, the first one included")
    disk: Positive = Field(64, description="MiB of files in its private /tmp")
    packages: tuple[str, ...] = Field((), description="packages that are loaded inside, beside the standard library")
    pool: Positive = Field(4, description="sandboxes that stand ready")
    running: Positive = Field(4, description="runs and gradings at one time; others wait")
    wait: Seconds = Field(300.0, description="how long a run waits for its turn before that is an error")


class Result(msgspec.Struct, frozen=True):
    """How a program ended and what it wrote. Only `code`, `seconds` and the statuses timeout, output and killed are
    certain; the rest comes from the program itself."""

    stdout: str
    stderr: str
    value: str | None  # of a last line that is an expression, as in a notebook
    status: Status
    code: int  # exit code; -n: ended by signal n
    seconds: float


class Verdict(msgspec.Struct, frozen=True):
    """The tests that a candidate passed, and the cause of its first failure."""

    cases: tuple[bool, ...]
    cause: str
    seconds: float

    @property
    def passed(self) -> int:
        """The number of passed tests."""
        return sum(self.cases)

    @property
    def total(self) -> int:
        """The number of tests."""
        return len(self.cases)

    @property
    def ok(self) -> bool:
        """True if it has tests and all of them passed."""
        return self.total > 0 and all(self.cases)


_LINES, _LINE = 1000, 4000  # bounds of a model's text, which is parsed here
_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*(\w*)")


class Asserts(msgspec.Struct, frozen=True):
    """Statements, each one a test, as in MBPP. They are code, whose author is trusted."""

    tests: tuple[str, ...]
    setup: str = ""


class Check(msgspec.Struct, frozen=True):
    """A function `check(candidate)`, as in HumanEval: one test. It is code, whose author is trusted.

    `setup` is code of the same author (helpers from the prompt). It runs with the test, so a candidate that defines the
    same names does not replace them. Only its classes and the entry point are taken from the candidate, because
    instances must exist in the process that receives them.
    """

    test: str
    entry_point: str
    setup: str = ""


class Case(msgspec.Struct, frozen=True):
    """A call and its expected value."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    keywords: dict[str, Any] = {}

    def plain(self) -> list[Any]:
        """Return the case in the judge's format."""
        return [self.function, self.arguments, self.keywords, self.expected]


class Cases(msgspec.Struct, frozen=True):
    """Calls with their expected values."""

    cases: tuple[Case, ...]


class Pairs(msgspec.Struct, frozen=True):
    """Standard inputs of a whole program with their expected outputs; blanks at the ends of lines do not count."""

    pairs: tuple[tuple[str, str], ...]


Tests = Asserts | Check | Cases | Pairs


def literal_cases(text: str) -> Cases:
    """Return the lines `assert f(literals) == literal` of a text as cases.

    Other lines are left out, and so are literals that cannot be sent (`...`, or nested too deep).
    """
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
                case = Case(name, values, ast.literal_eval(expected), named)
                pack({"cases": [case.plain()]})
                return case
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, NotPlain):
        pass
    return None


def code_of(answer: str) -> str:
    """Return the program in an answer: the last fenced block marked Python, or the last block, or the whole text."""
    blocks = list(_blocks(answer))
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else answer


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the content of each fenced block; the last may be unclosed.

    Each character is read a fixed number of times, so that a model's text cannot block the event loop.
    """
    start = text.find(_FENCE)
    while start >= 0:
        line = text.find("\n", start)
        if line < 0:
            return
        end = text.find(_FENCE, line)
        named = _LANGUAGE.match(text, start + len(_FENCE))
        assert named is not None  # it also matches the empty string
        yield named[1], text[line + 1 : end if end >= 0 else None]
        start = text.find(_FENCE, end + len(_FENCE)) if end >= 0 else -1
