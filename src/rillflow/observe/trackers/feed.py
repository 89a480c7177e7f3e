"""Feeds one tracker from `metrics.jsonl`.

The number of the last line that was sent is kept in RUN/trackers/NAME.json, so a resumed run goes on after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec

from rillflow.observe.follower import POLL, Follower, Note, Outcome
from rillflow.observe.metrics import MetricsReader
from rillflow.observe.trackers.base import Point, Tracker, point_of

BATCH = 200  # lines that are sent at once


class SentLines(msgspec.Struct):
    """The note of a feed: the `seq` of the last line sent, where in the file it ended, and the tracker's ids."""

    sent: int = 0
    at: int = 0
    ids: dict[str, str] = {}


class Feed(Follower):
    """`open_tracker` is called with the noted ids when there is a first point to send, and again after a failure."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[dict[str, str]], Tracker],
        metrics: Path,
        note: Path,
        *,
        several: bool = False,
        tell: Callable[[str], None] | None = None,
        poll: float = POLL,
    ) -> None:
        super().__init__(name, tell=tell, poll=poll)
        self._open = open_tracker
        self._note = Note(note, SentLines())
        self._several = several
        self._reader = MetricsReader(metrics, _beginning(metrics, self._note.kept.at))
        self._tracker: Tracker | None = None
        self._waiting: list[Point] = []
        self._lines = 0  # read and not sent
        self._last = self._note.kept.sent

    def advance(self) -> bool:
        if not self._lines:
            self._read_on()
        if not self._lines:
            return False
        if self._waiting:
            self._write(self._waiting)
        self._waiting, self._lines = [], 0
        self._note.keep(sent=self._last, at=self._reader.at)
        return True

    def close(self, outcome: Outcome) -> None:
        if self._tracker is not None:
            self._tracker.close(outcome)

    def unsent(self) -> str:
        return _counted(self._lines + self._reader.left())

    def _read_on(self) -> None:
        for line in itertools.islice(self._reader.new(), BATCH):
            self._lines += 1
            number = int(line.get("seq", 0))
            point = point_of(line, several=self._several) if number > self._last else None
            self._last = max(self._last, number)
            if point is not None:
                self._waiting.append(point)

    def _write(self, points: list[Point]) -> None:
        if self._tracker is None:
            self._tracker = self._open(dict(self._note.kept.ids))
            self._note.keep(ids=self._tracker.ids)
        try:
            self._tracker.write(points)
        except BaseException:
            self._tracker = None
            raise


def _beginning(metrics: Path, at: int) -> int:
    """Return `at` where a line begins there, else 0: a supervised run that went back to a checkpoint has written other
    lines since. Their numbers tell which have been sent."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(at - 1, 0))
            return at if file.read(1) == b"\n" else 0
    except FileNotFoundError:
        return 0


def unsent_lines(metrics: Path, note: Path) -> str:
    """Return what has not been sent of a file, as it was noted; empty if that is nothing."""
    return _counted(MetricsReader(metrics, Note(note, SentLines()).kept.at).left())


def _counted(lines: int) -> str:
    return f"{lines} line{'s' * (lines > 1)} of metrics.jsonl" if lines else ""
