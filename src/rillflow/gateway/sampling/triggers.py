"""What makes a node stop sampling by itself: enough was sampled with these weights."""

from __future__ import annotations

from rillflow.config.agents import PauseConfig
from rillflow.contracts import Clock


class Threshold:
    """Counts since the last weights. Reached once, it is not reached again until it is told to count anew."""

    def __init__(self, bounds: PauseConfig, clock: Clock) -> None:
        self.bounds = bounds
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """New weights are there, or a pause has ended without any."""
        self._episodes = 0
        self._since = self._clock.monotonic()

    def episode_finished(self) -> None:
        self._episodes += 1

    def reached(self) -> str:
        """Why it is time to stop, in words; empty while it is not."""
        bounds = self.bounds
        if bounds.episodes is not None and self._episodes >= bounds.episodes:
            return f"{self._episodes} episodes since the last weights"
        if bounds.seconds is not None and self._clock.monotonic() - self._since >= bounds.seconds:
            return f"{bounds.seconds:g} s since the last weights"
        return ""
