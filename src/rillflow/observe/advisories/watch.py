"""Looks at a run while it is shown: each problem is said once, when it appears.

Reading a run folder takes a moment, so it is done in a thread; the view never waits for it. A look that fails is logged
once and ends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rillflow.contracts import Clock, SystemClock
from rillflow.observe.advisories.advisory import Advisory
from rillflow.observe.advisories.fact_reader import FactReader
from rillflow.observe.advisories.rules import advise
from rillflow.runtime.folder import RunFolder
from rillflow.types import Status

log = logging.getLogger(__name__)

EVERY = 15.0  # seconds between two looks
_SHOWN_ANYWAY = ("user_error",)  # the view shows the traceback of each when it comes


class Watch:
    def __init__(self, folder: RunFolder, say: Callable[[str], None], *, clock: Clock | None = None) -> None:
        self._facts = FactReader(folder)
        self._say = say
        self._clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(1, "advisories")
        self._looking: Future[list[Advisory]] | None = None
        self._next = self._clock.monotonic() + EVERY
        self._said: set[str] = set(_SHOWN_ANYWAY)
        self._complained = False

    def look(self, status: Status) -> None:
        """Say what the last look has found, and look again where it is time to."""
        if self._looking is not None and self._looking.done():
            self._tell(self._looking)
            self._looking = None
        if self._looking is None and self._clock.monotonic() >= self._next and status.phase != "ended":
            self._next = self._clock.monotonic() + EVERY
            self._looking = self._thread.submit(self._advise, status)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _advise(self, status: Status) -> list[Advisory]:
        return advise(self._facts.read(status, now=self._clock.now()))

    def _tell(self, found: Future[list[Advisory]]) -> None:
        if error := found.exception():
            if not self._complained:
                log.warning("the run's advisories cannot be made: %s", error)
            self._complained = True
            return
        for advisory in found.result():
            if advisory.severity == "problem" and advisory.key not in self._said:
                self._said.add(advisory.key)
                self._say(f"problem: {advisory.title} {advisory.what_to_do}")
