"""The numbers of a run's steps as columns, read from `metrics.jsonl` as it grows.

Only live steps are included: a rollback removes the steps of orphaned versions. A step that lacks a number has NaN.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.observe.metrics import MetricsReader

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
