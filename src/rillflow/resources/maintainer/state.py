"""The state of a maintainer on disk, so that the next one continues where it was killed.

RUN/maintainer.json is written before its actions are carried out: the next maintainer continues or undoes a start or a
retirement that was interrupted. A line of RUN/maintainer.jsonl is in the state before it is in the log, and the next
maintainer adds it if it is missing there: every decision has exactly one line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rillflow.errors import CorruptData
from rillflow.storage import disk_errors, write_atomic
from rillflow.types.base import json_decoder

FORMAT = 1
Action = Literal["begin", "grow", "shrink", "hold", "start", "joined", "failed", "stopped", "died", "refused"]


class Asked(NamedTuple):
    """The request of a version's report; `target` is in GPUs. The default stands for no report."""

    version: int = -1
    branch: str = ""
    target: int | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One decision or action. `version` is that of its report (-1: none), `branch` and `target` (in GPUs) are the
    report's request, `size` is the number of nodes and `wanted` the number to reach."""

    number: int
    time: float
    action: Action
    why: str
    size: int
    wanted: int | None
    version: int = -1
    branch: str = ""
    target: int | None = None
    nodes: list[str] = []
    by: str = "loop"
    dry_run: bool = False


class Own(msgspec.Struct):
    """A node of the executor: when its start began, how many starts had failed before it, when it joined, until when it
    may drain."""

    since: float
    attempt: int = 0
    joined: float | None = None
    leaving: float | None = None


class State(msgspec.Struct):
    """`report` is the version of the last report that was decided on, `target` the number of nodes to reach, `changed`
    the time of its last change, `number` the next node's number, `failures` the starts that failed in a row. `rates`
    are the nodes' samples a second and GPU in the last reports; `starved` is the size at which the trainer starved,
    with the number of reports for which it is remembered; `released` are the run's own workers whose `rollout` was
    taken away."""

    format: int = FORMAT
    report: int = -1
    target: int | None = None
    changed: float | None = None
    number: int = 0
    nodes: dict[str, Own] = msgspec.field(default_factory=dict)
    failures: int = 0
    retry: float = 0.0
    rates: dict[str, list[float]] = msgspec.field(default_factory=dict)
    starved: int = 0
    remembered: int = 0
    released: list[str] = msgspec.field(default_factory=list)
    lines: int = 0
    line: Line | None = None

    @property
    def starting(self) -> list[str]:
        return [name for name, own in self.nodes.items() if own.joined is None and own.leaving is None]

    @property
    def leaving(self) -> list[str]:
        return [name for name, own in self.nodes.items() if own.leaving is not None]


class Book:
    """The two files of one maintainer, in one folder. One process uses them at a time (the caller holds the lock)."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "maintainer.json"
        self._log = folder / "maintainer.jsonl"
        self.state = self._read()
        self._mend()

    def commit(self, line: Line | None = None) -> None:
        """Write the state, and with it the line."""
        if line is not None:
            self.state.lines, self.state.line = line.number + 1, line
        write_atomic(self._path, msgspec.json.format(msgspec.json.encode(self.state), indent=2) + b"\n")
        if line is not None:
            self._append(line)

    def lines(self, last: int) -> list[Line]:
        """The newest ones, oldest first."""
        if not self._log.is_file():
            return []
        raw = self._log.read_bytes().splitlines()[-last:]
        return [json_decoder(Line).decode(line) for line in raw]

    def _read(self) -> State:
        if not self._path.is_file():
            return State()
        try:
            state = json_decoder(State).decode(self._path.read_bytes())
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{self._path} cannot be read: {error}",
                "remove it: a new maintainer then adopts the nodes that its executor still has",
            ) from error
        if state.format != FORMAT:
            raise CorruptData(
                f"{self._path} has format {state.format}, this version reads {FORMAT}",
                "use the version of rillflow that wrote it, or remove it",
            )
        return state

    def _mend(self) -> None:
        """Truncate a torn last line, and add the line of the state if it is missing."""
        if self._log.is_file():
            data = self._log.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                with disk_errors(self._log):
                    os.truncate(self._log, whole)
        line = self.state.line
        last = self.lines(1)
        if line is not None and (not last or last[0].number < line.number):
            self._append(line)

    def _append(self, line: Line) -> None:
        with disk_errors(self._log), open(self._log, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
