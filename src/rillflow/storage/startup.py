"""The stages of a process's start, for people who wait for it: RUN/starting/PROCESS.json.

A process names each stage of its start as it begins (`importing torch`, `loading the model`) and says that it is
`ready` at the end; a process that is started again begins with its first stage. A reader sees one stage or the next,
never half of one. The file is only for show: it is not synced, and a disk that cannot take it stops nothing.

The stage is global to a process, like its log: whatever code does the work may call `doing`. It does nothing before
`report_to`, so the same code works in tests and in processes without a supervisor.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rillflow.types.base import json_decoder

log = logging.getLogger(__name__)

FOLDER = "starting"
READY = "ready"
NOT_BEGUN = "starting the process"


class Stage(msgspec.Struct, frozen=True):
    """A process's stage since `since`, in seconds since the epoch."""

    doing: str
    since: float


class Starting(NamedTuple):
    """A process that has not started yet, and for how many seconds it has done what it does."""

    process: str
    doing: str
    seconds: float


class _Reporter:
    """Writes the stages of this process, to a file once it has one."""

    def __init__(self) -> None:
        self.path: Path | None = None

    def write(self, stage: Stage) -> None:
        if self.path is None:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(stage))
            temporary.replace(self.path)
        except OSError as error:
            log.debug("the stage %r was not written: %s", stage.doing, error)


_reporter = _Reporter()


def report_to(run: Path, process: str, first: str) -> None:
    """Report the stages of this process from now on, under its name in the run's folder, beginning with `first`."""
    _reporter.path = stage_path(run, process)
    doing(first)


def doing(what: str) -> None:
    """Name the stage that begins now."""
    _reporter.write(Stage(what, time.time()))


def ready() -> None:
    """Say that this process has started."""
    doing(READY)


def and_ready(then: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that calls `then` and says that this process has started."""

    def both(url: str) -> None:
        then(url)
        ready()

    return both


def stage_path(run: Path, process: str) -> Path:
    return run / FOLDER / f"{process}.json"


def read_stage(run: Path, process: str) -> Stage | None:
    """Return what the process said last, or None if it has said nothing."""
    with suppress(OSError, msgspec.MsgspecError):
        return json_decoder(Stage).decode(stage_path(run, process).read_bytes())
    return None


def starting(run: Path, process: str, began: float, now: float, first: str = NOT_BEGUN) -> Starting | None:
    """Return what a process does that was started at `began`; None when it is ready. `first` is its first stage.

    What it said before belongs to an earlier life. A process whose start is unknown (`began` is 0: another machine runs
    it) is believed, and not waited for when it says nothing.
    """
    stage = read_stage(run, process)
    if stage is None or stage.since < began:
        return Starting(process, first, now - began) if began else None
    return None if stage.doing == READY else Starting(process, stage.doing, now - stage.since)
