"""What the workers of a run did when, read from RUN/timeline as it grows.

A worker's file is followed by its inode: a full one becomes WORKER.jsonl.1, of which the rest is read before the new
one. At most `MOST` spans of a worker are kept, the latest. Spans are columns, so that a hundred thousand of them are
drawn in milliseconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rillflow.storage.spans import FOLDER, STATES, Span, decode_spans

Numbers = npt.NDArray[np.float64]

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
        """With neighbours of one state as one: a state that lasts is written in parts."""
        if len(self) < 2:
            return self
        apart = (self.state[1:] != self.state[:-1]) | (self.begin[1:] != self.end[:-1])
        first = np.flatnonzero(np.concatenate(([True], apart)))
        last = np.concatenate((first[1:], [len(self)])) - 1
        return Spans(self.begin[first], self.end[last], self.state[first])

    def then(self, later: Spans) -> Spans:
        """These and those that begin after them."""
        after = later.begin >= self.end[-1] if len(self) else np.ones(len(later), np.bool_)
        begin = np.concatenate((self.begin, later.begin[after]))[-MOST:]
        end = np.concatenate((self.end, later.end[after]))[-MOST:]
        return Spans(begin, end, np.concatenate((self.state, later.state[after]))[-MOST:]).joined()

    def within(self, low: float, high: float) -> Spans:
        """The part between two moments, cut to them."""
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
