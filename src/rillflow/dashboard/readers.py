"""Readers of the files that a run appends to: the numbers of its steps, and what its workers did when.

Steps are columns read from `metrics.jsonl` as it grows. Only live steps are included: a rollback removes the steps of
orphaned versions. A step that lacks a number has NaN.

The spans of workers are read from RUN/timeline. A worker's file is followed by its inode: a full one becomes
WORKER.jsonl.1, of which the rest is read before the new one. At most `MOST` spans of a worker are kept, the latest.
Spans are columns, so that a hundred thousand of them are drawn in milliseconds.
"""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.observe.metrics import MetricsReader
from rillflow.storage.spans import FOLDER, STATES, Span, decode_spans

# ---------------------------------------------------------------- steps


Numbers = npt.NDArray[np.float64]

_NUMBERS = (float, int)
_KEYS = frozenset(("policy", "step", "version", "time", "seq"))
MOST_EVENTS = 10_000  # evaluations, and balance reports, that are kept: the latest


@dataclass
class Steps:
    """The live steps of one policy, in order."""

    step: array[float] = field(default_factory=lambda: array("d"))
    version: array[float] = field(default_factory=lambda: array("d"))
    time: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def add(self, line: dict[str, Any]) -> None:
        before, added = len(self.step), 0
        self.step.append(float(line["step"]))
        self.version.append(float(line.get("version", line["step"])))
        self.time.append(float(line.get("time", math.nan)))
        columns = self.columns
        for name, value in line.items():
            if type(value) in _NUMBERS and name not in _KEYS:  # not a bool
                column = columns.get(name)
                if column is None:
                    column = columns[name] = array("d", [math.nan]) * before
                column.append(value)
                added += 1
        if added < len(columns):
            for column in columns.values():
                if len(column) <= before:
                    column.append(math.nan)

    def keep_until(self, version: int) -> None:
        """Forget the steps of later versions."""
        kept = bisect_right(self.version, version)
        for column in (self.step, self.version, self.time, *self.columns.values()):
            del column[kept:]

    def last(self, name: str) -> float | None:
        """The newest value of a column; None where no step has one."""
        for value in reversed(self.columns.get(name, ())):
            if not math.isnan(value):
                return value
        return None


class Curves:
    """The steps of all policies, the evaluations and the balance reports of one run. `first` is its first policy."""

    def __init__(self, path: Path, first: str) -> None:
        self._reader = MetricsReader(path)
        self._first = first
        self.policies: dict[str, Steps] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.balances: list[dict[str, Any]] = []
        self.rollbacks = 0
        self.torn = 0

    def follow(self) -> None:
        """Read what was written since the last call."""
        for line in self._reader.new():
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.torn += 1  # a foreign line, or one that a crash has torn
        del self.evaluations[:-MOST_EVENTS], self.balances[:-MOST_EVENTS]

    def _take(self, line: dict[str, Any]) -> None:
        match line.get("event"):
            case None:
                self.policies.setdefault(line.get("policy", self._first), Steps()).add(line)
            case "evaluation":
                self.evaluations.append(line)
            case "balance":
                self.balances.append(line)
            case "rollback":
                self.rollbacks += 1
                version = int(line["version"])
                if line["policy"] in self.policies:
                    self.policies[line["policy"]].keep_until(version)
                if line["policy"] == self._first:
                    self.evaluations = [done for done in self.evaluations if done["version"] <= version]

    def ordered(self, first: Sequence[str]) -> list[tuple[str, Steps]]:
        """The policies, those named in `first` before all others."""
        names = [*first, *(name for name in self.policies if name not in first)]
        return [(name, self.policies[name]) for name in names if name in self.policies]

    def names(self) -> list[str]:
        """All columns, of any policy."""
        return sorted({name for steps in self.policies.values() for name in steps.columns})


def thinned(x: array[float], y: array[float], width: int) -> list[tuple[float, float]]:
    """The curve as `width` pixels show it: of the points that share a pixel only the lowest and the highest remain.

    Values that are not finite are left out.
    """
    xs, ys = np.frombuffer(x, np.float64), np.frombuffer(y, np.float64)
    seen = np.isfinite(ys)
    xs, ys = xs[seen], ys[seen]
    if len(xs) > 2 * width:
        kept = _extremes(ys, width)
        xs, ys = xs[kept], ys[kept]
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _extremes(ys: Numbers, width: int) -> npt.NDArray[np.intp]:
    """Indices of the first, the last, and the least and greatest value of each of `width` equal parts."""
    size = -(-len(ys) // width)
    parts = -(-len(ys) // size)
    padded = np.pad(ys, (0, parts * size - len(ys)), mode="edge").reshape(parts, size)
    begins = np.arange(parts) * size
    both = np.concatenate((begins + padded.argmin(axis=1), begins + padded.argmax(axis=1), [0, len(ys) - 1]))
    return np.unique(np.minimum(both, len(ys) - 1))


# ---------------------------------------------------------------- workers


MOST = 200_000
IDLE = STATES.index("idle")
_CODES = {state: code for code, state in enumerate(STATES)}


@dataclass(frozen=True)
class Spans:
    """Spans in order, which do not overlap: `state` is an index into `STATES`."""

    begin: Numbers
    end: Numbers
    state: npt.NDArray[np.int8]

    @classmethod
    def of(cls, spans: list[Span]) -> Spans:
        """Return the spans of a file as columns, without those out of order."""
        count = len(spans)
        begin = np.fromiter((span.begin for span in spans), np.float64, count)
        end = np.fromiter((span.end for span in spans), np.float64, count)
        state = np.fromiter((_CODES[span.state] for span in spans), np.int8, count)
        kept = begin >= np.maximum.accumulate(np.concatenate(([-np.inf], end)))[:-1]
        return cls(begin[kept], end[kept], state[kept]).joined()

    def __len__(self) -> int:
        return len(self.begin)

    def joined(self) -> Spans:
        """Return the spans with neighbours of the same state joined: a state that lasts is written in parts."""
        if len(self) < 2:
            return self
        apart = (self.state[1:] != self.state[:-1]) | (self.begin[1:] != self.end[:-1])
        first = np.flatnonzero(np.concatenate(([True], apart)))
        last = np.concatenate((first[1:], [len(self)])) - 1
        return Spans(self.begin[first], self.end[last], self.state[first])

    def then(self, later: Spans) -> Spans:
        """Return these spans and the later ones that begin after them."""
        after = later.begin >= self.end[-1] if len(self) else np.ones(len(later), np.bool_)
        begin = np.concatenate((self.begin, later.begin[after]))[-MOST:]
        end = np.concatenate((self.end, later.end[after]))[-MOST:]
        return Spans(begin, end, np.concatenate((self.state, later.state[after]))[-MOST:]).joined()

    def within(self, low: float, high: float) -> Spans:
        """Return what lies between two moments, cut at both."""
        inside = slice(int(np.searchsorted(self.end, low, "right")), int(np.searchsorted(self.begin, high, "left")))
        return Spans(np.maximum(self.begin[inside], low), np.minimum(self.end[inside], high), self.state[inside])

    def seconds(self, edges: Numbers) -> npt.NDArray[np.float64]:
        """How long each state lasted between each edge and the next: a row for each state."""
        rows = []
        for code in range(len(STATES)):
            own = self.state == code
            begin, end = self.begin[own], self.end[own]
            total = np.concatenate(([0.0], np.cumsum(end - begin)))
            times = np.stack((begin, end), axis=1).ravel()
            until = np.stack((total[:-1], total[1:]), axis=1).ravel()
            rows.append(np.diff(np.interp(edges, times, until)) if len(times) else np.zeros(len(edges) - 1))
        return np.array(rows)


NOTHING = Spans(np.empty(0), np.empty(0), np.empty(0, np.int8))


class Lane:
    """The spans of one worker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = 0  # the inode that was read last
        self._at = 0
        self.spans = NOTHING

    def follow(self) -> None:
        """Read what was written since the last call."""
        old = self._path.with_name(f"{self._path.name}.1")
        if self._file != _inode(self._path):
            if self._file in (0, _inode(old)):
                self._read(old)
            self._at = 0
            self._file = _inode(self._path)
        self._read(self._path)

    def _read(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._at += whole
        if whole:
            self.spans = self.spans.then(Spans.of(decode_spans(data[:whole].splitlines())))


class Lanes:
    """All workers of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lanes: dict[str, Lane] = {}

    def follow(self) -> dict[str, Spans]:
        """The spans of each worker that has any."""
        for path in sorted(self._folder.glob("*.jsonl")):
            worker = path.name.removesuffix(".jsonl")
            self._lanes.setdefault(worker, Lane(path)).follow()
        return {worker: lane.spans for worker, lane in self._lanes.items() if len(lane.spans)}


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
