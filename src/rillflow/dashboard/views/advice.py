"""The advisories of a run, problems first.

They depend on the time as well as on the run folder, so they are made again after a while, whatever has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.observe.advisories import advise

FRESH = 10.0  # seconds; those of a run that has ended are used six times as long


class Advice:
    """The advisories of each run, as they were last made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made: dict[str, tuple[float, dict[str, Any]]] = {}

    def of(self, run: WatchedRun, live: Live | None) -> dict[str, Any]:
        until, found = self._made.get(run.name, (0.0, {}))
        if self._clock() >= until:
            found = _advice(run, live)
            self._made[run.name] = self._clock() + (FRESH if run.running else 6 * FRESH), found
        return found


def _advice(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    facts = run.facts.read(live.status if live else None, live.nodes if live else None, run.now())
    return {"advisories": msgspec.to_builtins(advise(facts)), "unread": facts.unread}
