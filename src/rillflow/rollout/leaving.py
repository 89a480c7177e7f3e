"""The deadline of a node that leaves, because it was retired or its process was asked to stop.

A module of its own: the CLI imports it, and must not import what a node imports.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rillflow.contracts import Clock, SystemClock


class Departure:
    """The deadline of one node. The earliest one counts; `on_change` is called when it changes."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock or SystemClock()
        self._at = math.inf

    @property
    def begun(self) -> bool:
        return self._at < math.inf

    @property
    def left(self) -> float:
        """Seconds left for running episodes; infinite for a node that stays."""
        return max(0.0, self._at - self._clock.monotonic())

    def within(self, seconds: float) -> None:
        at = self._clock.monotonic() + seconds
        if at < self._at:
            self._at = at
            self.on_change()
