"""A tracker in a process of its own (`__main__`), for packages that bring threads, exit hooks and processes with them.

The child follows `metrics.jsonl`. It prints messages for the user, one JSON text a line, and ends when its input names
the outcome of the run, or when its parent is gone. A child that takes too long then is killed with its own children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from rillflow.observe.follower import Outcome
from rillflow.observe.trackers.feed import unsent_lines

CLOSING = 30.0  # seconds that all trackers together have for the rest at the end of a run


class ChildTracker:
    """Starts the child, and has what a `Follower` has for those who start and end trackers."""

    def __init__(self, name: str, run: Path, metrics: Path, note: Path, log: Path) -> None:
        self.name = name
        self.news: list[str] = []
        self._command = [sys.executable, "-m", __package__, str(run), name]
        self._metrics, self._note, self._log = metrics, note, log
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        try:
            with open(self._log, "a") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the run; and all that it starts can be killed with it
                )
        except OSError as error:
            self.news.append(f"tracker {self.name} could not be started: {error}")
            return
        self._reader.start()

    def stop(self, outcome: Outcome) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended already
                self._process.stdin.write(f"{outcome}\n")
                self._process.stdin.close()

    def join(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            code = None
            self.news.append(f"tracker {self.name} did not finish within {seconds:.0f} s")
        self._reader.join(1.0)
        if code:
            self.news.append(f"tracker {self.name} ended with code {code}; see {self._log}")
        if code != 0 and (left := unsent_lines(self._metrics, self._note)):
            self.news.append(f"tracker {self.name}: {left} could not be sent; `rillflow resume` sends the rest")

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.news.append(json.loads(line))
