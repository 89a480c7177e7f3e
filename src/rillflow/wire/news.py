"""The signal that wakes long polls."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class News:
    """Wakes waiting long polls after a change, at most every `pause` seconds; each then checks its condition again."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._event = asyncio.Event()
        self._told = False
        self.waiting = 0

    def tell(self) -> None:
        if self.waiting and not self._told:
            self._told = True
            asyncio.get_running_loop().call_later(self._pause, self._wake)

    def _wake(self) -> None:
        self._told = False
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        event = self._event
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                # Not `wait_for`: on Python 3.11 it swallows a cancellation that comes with the event.
                async with asyncio.timeout(seconds):
                    await event.wait()
        finally:
            self.waiting -= 1
