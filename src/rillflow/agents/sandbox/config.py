"""What can be set of a sandbox."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.base import Positive, Seconds, Section


class SandboxConfig(Section):
    """The limits of each run and the size of the pool. The most memory that one run can take is `memory` times
    `processes`, plus `disk` twice (its files are in memory)."""

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
