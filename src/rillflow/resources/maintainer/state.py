"""What a maintainer remembers, so that the next one goes on where it was killed.

RUN/maintainer.json is written before anything that it tells is done: a start or a retirement that was cut short is in
it and is carried on, or undone, by whoever reads it next. A line of RUN/maintainer.jsonl lies in the state before it
lies in the log, and is brought to the log by who finds it missing there: no decision is without its line, and none has
two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rillflow.errors import CorruptData
from rillflow.storage import disk_errors, write_atomic
from rillflow.types.decoding import json_decoder

FORMAT = 1
Action = Literal["begin", "grow", "shrink", "hold", "start", "joined", "failed", "stopped", "died", "refused"]


class Asked(NamedTuple):
    """What the report of a version asks for; `target` is in GPUs. The default: there is no report."""

    version: int = -1
    branch: str = ""
    target: int | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One decision or action. `version` is that of the report it follows (-1: none), `branch` and `target` (in GPUs)
    what the report asks for, `size` how many nodes there are and `wanted` how many there are to be."""

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
    """A node of the executor's: since when it is being started, how many starts had failed before it, when it joined,
    until when it may drain."""

    since: float
    attempt: int = 0
    joined: float | None = None
    leaving: float | None = None


class State(msgspec.Struct):
    """`report` is the version of the last report that was decided on, `target` the nodes there are to be, `changed`
    when that was last changed, `number` the next node's, `failures` the starts that failed in a row. `rates` are the
    nodes' samples a second and GPU in the last reports; `starved` the size at which the trainer starved, and the
    reports for which that is remembered; `released` the run's own workers whose `rollout` was taken away."""

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
    """The two files of one maintainer, in one folder. Held by one process at a time (its lock is the caller's)."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "maintainer.json"
        self._log = folder / "maintainer.jsonl"
        self.state = self._read()
        self._mend()

    def commit(self, line: Line | None = None) -> None:
        """Keep the state, and with it the line."""
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
        """Cut what a death left half written, and add the line that it kept from being written."""
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
