"""A thread that follows what a run writes and sends it elsewhere, without the run noticing.

The run folder is the queue: a slow or absent receiver falls behind in it, and memory holds one batch at most. An error
is reported once, then sending is retried with growing pauses.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from rillflow.storage import write_atomic

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks
PATIENCE = 60.0  # at most, between two attempts at a receiver that fails

Outcome = Literal["finished", "failed", "stopped"]
Kept = TypeVar("Kept", bound=msgspec.Struct)


class Note(Generic[Kept]):
    """What a follower has sent, in a file of the run folder, so that a resumed run goes on after it. A note that is
    missing or damaged is as `nothing`: everything is sent again."""

    def __init__(self, path: Path, nothing: Kept) -> None:
        self._path = path
        try:
            self.kept = msgspec.json.decode(path.read_bytes(), type=type(nothing))
        except (OSError, msgspec.MsgspecError):
            self.kept = nothing

    def keep(self, **changes: object) -> None:
        self.kept = msgspec.structs.replace(self.kept, **changes)
        self._path.parent.mkdir(exist_ok=True)
        write_atomic(self._path, msgspec.json.encode(self.kept))


class Follower(ABC):
    """`tell` gets messages for the user: that sending fails (once), and at the end what was not sent. Without `tell`
    they are kept in `news`."""

    def __init__(self, name: str, *, tell: Callable[[str], None] | None = None, poll: float = POLL) -> None:
        self.name = name
        self.news: list[str] = []
        self._say = tell or self.news.append
        self._poll = poll
        self._failed = False
        self._outcome: Outcome = "stopped"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"tracker-{name}", daemon=True)

    @abstractmethod
    def advance(self) -> bool:
        """Send the next batch; whether there was one. It may raise, and is called again later then."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Say goodbye to the receiver; called once, after the rest was sent. It may raise."""

    @abstractmethod
    def unsent(self) -> str:
        """Return what has not been sent, in words; empty if that is nothing."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, outcome: Outcome) -> None:
        """Ask it to send the rest and to close; returns at once."""
        self._outcome = outcome
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait until it has closed. A receiver that takes longer is abandoned, and the rest is reported."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"tracker {self.name} did not finish within {seconds:.0f} s")
        if left := self.unsent():
            self._say(f"tracker {self.name}: {left} could not be sent; `rillflow resume` sends the rest")

    # ------------------------------------------------------------ in the thread

    def _follow(self) -> None:
        pause = self._poll
        while not self._stop.wait(pause):
            pause = self._poll if self._attempt() else min(2 * pause, PATIENCE)
        if self._attempt():
            try:
                self.close(self._outcome)
            except (Exception, SystemExit) as error:
                self._tell(error)

    def _attempt(self) -> bool:
        """Send all that is new; whether that went well. No error of a receiver goes further than this."""
        try:
            while self.advance():
                pass
        except (Exception, SystemExit) as error:
            self._tell(error)
            return False
        return True

    def _tell(self, error: BaseException) -> None:
        log.warning("tracker %s failed", self.name, exc_info=error)
        if not self._failed:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"tracker {self.name} fails, and is tried again while the run goes on: {text}")
        self._failed = True
