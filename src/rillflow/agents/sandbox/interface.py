"""The settings and the results of a sandbox."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import Field

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
        """Whether there are tests and all passed."""
        return self.total > 0 and all(self.cases)
