"""How the service waits: for the disk (group commit) and for news (long polls). No wait is without a bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from rillflow.contracts import Clock
from rillflow.dataflow.ledger import Ledger
from rillflow.errors import RillflowError, StorageError

log = logging.getLogger(__name__)


class GroupCommit:
    """Many callers, one fsync: a reply goes out only after the commit that contains its change."""

    def __init__(self, ledger: Ledger, interval: float, after: Callable[[], None]) -> None:
        self._ledger = ledger
        self._interval = interval
        self._after = after  # called when everything is on disk and nothing new has been changed yet
        self._next: asyncio.Future[None] | None = None
        ledger.on_abandon = self._failed

    async def durable(self) -> None:
        """Returns when every transition made so far is on disk; raises what the disk said when it is not."""
        if not self._ledger.dirty:
            return
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(self._interval, self._flush)
        await asyncio.shield(self._next)  # a caller that goes away must not cancel the others' wait

    def _flush(self) -> None:
        try:
            self._ledger.commit()
        except RillflowError as error:
            self._failed(error)
            return
        except Exception as error:
            log.exception("a commit failed")
            self._failed(StorageError(f"the ledger was not committed: {type(error).__name__}: {error}", "see the log"))
            return
        try:
            self._after()
        except Exception:
            log.exception("what follows a commit failed")  # the commit did not: those who wait for it must be told
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    def _failed(self, error: RillflowError) -> None:
        """The open transaction was taken back: nobody who waits for it may be told that it was done."""
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_exception(error)
            waiting.exception()  # seen, also when all who waited have gone away


class Watch:
    """Notices that time has passed in which nobody could be heard: deadlines that it reached say nothing of others."""

    def __init__(self, clock: Clock, most: float) -> None:
        self._clock = clock
        self._most = most
        self._wall, self._steady = clock.now(), clock.monotonic()

    def disturbed(self) -> bool:
        """Whether this process stood still, or the wall clock was set, since it was asked last."""
        wall, steady = self._wall, self._steady
        self._wall, self._steady = self._clock.now(), self._clock.monotonic()
        passed = self._steady - steady
        return passed > self._most or abs(self._wall - wall - passed) > self._most


class News:
    """Wakes those who wait for something to change; waking too often is harmless."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.waiting = 0

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        event = self._event
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
        finally:
            self.waiting -= 1
