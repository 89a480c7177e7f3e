"""When a node has to be gone: because somebody retired it, or asked its process to stop."""

from __future__ import annotations

import math
from collections.abc import Callable

from rillflow.contracts import Clock, SystemClock


class Departure:
    """Of one node. The earliest word counts; `on_change` is told of every one that does."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock or SystemClock()
        self._at = math.inf

    @property
    def begun(self) -> bool:
        return self._at < math.inf

    @property
    def left(self) -> float:
        """Seconds to go on with what is under way; infinite for a node that stays."""
        return max(0.0, self._at - self._clock.monotonic())

    def within(self, seconds: float) -> None:
        at = self._clock.monotonic() + seconds
        if at < self._at:
            self._at = at
            self.on_change()
