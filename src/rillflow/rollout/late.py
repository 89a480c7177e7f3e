"""Rewards that come after an episode has ended, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from rillflow.contracts import Clock

LOOK = 1.0  # longest sleep between two looks at the clock


class LateRewards:
    """Wakes who waits for a session's reward. It holds one entry for each session that is waited for, no others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._news: dict[str, asyncio.Event] = {}

    def given(self, session: str) -> None:
        if session in self._news:
            self._news[session].set()

    async def wait(self, session: str, enough: Callable[[], bool], until: float) -> bool:
        """Whether `enough` became true before `until`, by the monotonic clock; it is asked after every gift."""
        news = self._news[session] = asyncio.Event()
        try:
            while not enough():
                left = until - self._clock.monotonic()
                if left <= 0:
                    return False
                news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK)):
                        await news.wait()
            return True
        finally:
            del self._news[session]
