"""TensorBoard event files in RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rillflow.observe.event_file import EventFile
from rillflow.observe.follower import Outcome
from rillflow.observe.trackers.base import Point


class TensorBoard:
    """Writes a file of its own. A file that could not take something may end in half a record: it is the last then."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    @property
    def ids(self) -> dict[str, str]:
        return {}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.named.items():
                self._file.add(name, value, point.step, point.time)
        try:
            self._file.flush()
        except OSError:
            with suppress(OSError):  # closing flushes first
                self._file.close()
            raise

    def close(self, outcome: Outcome) -> None:
        self._file.close()
