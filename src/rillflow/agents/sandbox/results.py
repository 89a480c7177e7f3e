"""What comes out of a sandbox: the result of a program, the verdict on a candidate."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "error", "exit", "timeout", "output", "memory", "killed"]


class Result(msgspec.Struct, frozen=True):
    """How a program ended and what it wrote. Only `code`, `seconds` and the statuses timeout, output and killed are
    known for sure; the rest is the program's own word."""

    stdout: str
    stderr: str
    value: str | None  # of a last line that is an expression, as in a notebook
    status: Status
    code: int  # exit code; -n: ended by signal n
    seconds: float


class Verdict(msgspec.Struct, frozen=True):
    """Which tests a candidate passed, and why it did not pass the first that failed."""

    cases: tuple[bool, ...]
    cause: str
    seconds: float

    @property
    def passed(self) -> int:
        return sum(self.cases)

    @property
    def total(self) -> int:
        return len(self.cases)

    @property
    def ok(self) -> bool:
        return self.total > 0 and all(self.cases)
