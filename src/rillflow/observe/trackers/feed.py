"""Feeds one tracker from `metrics.jsonl`, in a thread of its own.

The file is the queue: a tracker that is slow or away falls behind in it, and memory holds one batch at most. The number
of the last line that was sent is kept in RUN/trackers/NAME.json, so a resumed run goes on after it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from rillflow.observe.metrics import MetricsReader
from rillflow.observe.trackers.base import Outcome, Point, Tracker, point_of
from rillflow.storage import write_atomic

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks at the file
PATIENCE = 60.0  # at most, between two attempts at a tracker that fails
BATCH = 200  # lines that are sent at once


class Kept(msgspec.Struct):
    """What a feed notes: the `seq` of the last line sent, where in the file it ended, and the tracker's ids."""

    sent: int = 0
    at: int = 0
    ids: dict[str, str] = {}


class Feed:
    """`open_tracker` is called with the noted ids when there is a first point to send, and again after it has failed.

    `news` holds what a person must be told: that the tracker fails (once), and at the end what was not sent.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[dict[str, str]], Tracker],
        metrics: Path,
        note: Path,
        *,
        several: bool = False,
        poll: float = POLL,
    ) -> None:
        self.name = name
        self.news: list[str] = []
        self._open = open_tracker
        self._note = note
        self._several = several
        self._poll = poll
        self._kept = _read(note)
        self._reader = MetricsReader(metrics, self._kept.at)
        self._tracker: Tracker | None = None
        self._waiting: list[Point] = []
        self._lines = 0  # read and not sent
        self._last = self._kept.sent
        self._failed = False
        self._outcome: Outcome | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, outcome: Outcome) -> None:
        """Ask it to send the rest and to close the tracker; returns at once."""
        self._outcome = outcome
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait for that. A tracker that has not finished by then is abandoned; what it did not take is told."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.news.append(f"tracker {self.name} did not finish within {seconds:.0f} s")
        if left := self.unsent():
            lines = f"{left} line{'s' * (left > 1)} of metrics.jsonl"
            self.news.append(f"tracker {self.name}: {lines} could not be sent; `rillflow resume` sends them")

    def unsent(self) -> int:
        return self._lines + self._reader.left()

    # ------------------------------------------------------------ in the thread

    def _follow(self) -> None:
        pause = self._poll
        while not self._stop.wait(pause):
            pause = self._poll if self._attempt() else min(2 * pause, PATIENCE)
        if self._attempt():
            self._close()

    def _attempt(self) -> bool:
        """Send all that is new; whether that went well. No error of a tracker goes further than this."""
        try:
            while self._read_on():
                self._send()
        except (Exception, SystemExit) as error:
            self._tell(error)
            self._tracker = None
            return False
        return True

    def _read_on(self) -> bool:
        """Whether there is something to send: what failed last time, or the next lines."""
        if self._lines:
            return True
        for line in itertools.islice(self._reader.new(), BATCH):
            self._lines += 1
            number = int(line.get("seq", 0))
            point = point_of(line, several=self._several) if number > self._last else None
            self._last = max(self._last, number)
            if point is not None:
                self._waiting.append(point)
        return self._lines > 0

    def _send(self) -> None:
        if self._waiting:
            if self._tracker is None:
                self._tracker = self._open(dict(self._kept.ids))
                self._keep(ids=self._tracker.ids)
            self._tracker.write(self._waiting)
        self._waiting, self._lines = [], 0
        self._keep(sent=self._last, at=self._reader.at)

    def _close(self) -> None:
        try:
            if self._tracker is not None:
                self._tracker.close(self._outcome or "stopped")
        except (Exception, SystemExit) as error:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        log.warning("tracker %s failed", self.name, exc_info=error)
        if not self._failed:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.news.append(f"tracker {self.name} fails, and is tried again while the run goes on: {text}")
        self._failed = True

    def _keep(self, **changes: object) -> None:
        self._kept = msgspec.structs.replace(self._kept, **changes)
        self._note.parent.mkdir(exist_ok=True)
        write_atomic(self._note, msgspec.json.encode(self._kept))


def _read(note: Path) -> Kept:
    """Return what was noted; a note that is missing or damaged means that everything is sent again."""
    try:
        return msgspec.json.decode(note.read_bytes(), type=Kept)
    except (OSError, msgspec.MsgspecError):
        return Kept()
