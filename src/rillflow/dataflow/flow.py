"""How the service waits: for the disk (group commit) and for news (long polls). No wait is without a bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rillflow.contracts import Clock
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.errors import RillflowError, StorageError

log = logging.getLogger(__name__)

COPY_EVERY = 8192  # rows changed between two copies of the log: some 16 MiB of it


class GroupCommit:
    """Many callers, one fsync: a reply goes out only after the sync that contains its change.

    Changes are written to the log together, at most every `interval` seconds. A thread syncs the log; changes made
    during a sync are written when it ends, so each write has exactly one sync. After a failed sync the state of the
    disk is unknown: nothing is acknowledged any more and `broken` is called.

    Another thread copies the log into the database's file, now and then: most of it while changes go on. The log can
    begin anew only when all of it is copied and no transaction is open, so new changes wait in `room` while the rest,
    which is short, is copied.
    """

    def __init__(
        self,
        ledger: Ledger,
        interval: float,
        after: Callable[[int], None],
        broken: Callable[[RillflowError], None] = lambda error: None,
    ) -> None:
        self._ledger = ledger
        self._interval = interval
        self._after = after  # told the number of the last event that is on the disk
        self._broken = broken
        self._thread = ThreadPoolExecutor(1, "ledger-sync")
        self._timer: asyncio.TimerHandle | None = None  # of the next write
        self._due = False  # a write is due as soon as the current sync ends
        self._changed: asyncio.Future[None] | None = None  # of changes that are not in the log yet
        self._syncing: asyncio.Future[None] | None = None
        self._copier = ThreadPoolExecutor(1, "ledger-checkpoint")
        self._copying: asyncio.Task[None] | None = None
        self._closed_until: asyncio.Future[None] | None = None  # the end of the last part of a copy
        self._copied = ledger.db.changes
        ledger.db.checkpoint_beside()
        ledger.on_abandon = self._failed

    async def room(self) -> None:
        """Returns when changes may be made."""
        while self._closed_until is not None:
            await asyncio.shield(self._closed_until)

    async def durable(self) -> None:
        """Returns when every transition made so far is on disk; raises what the disk said when it is not."""
        waiting = self._newest()
        if waiting is not None:
            await asyncio.shield(waiting)  # a caller that goes away must not cancel the others' wait

    async def close(self) -> None:
        """What was changed so far is durable and told, or refused; nothing is under way any more."""
        try:
            if self._copying is not None:
                await asyncio.wait([self._copying])
            with suppress(RillflowError):  # told to those who wait for it
                await self.durable()
        finally:
            self._forget_timer()
            self._thread.shutdown()
            self._copier.shutdown()

    def _forget_timer(self) -> None:
        """Whoever needs the next write asks for one of its own: no change is written that nobody syncs."""
        self._due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _newest(self) -> asyncio.Future[None] | None:
        """What contains every change so far; None when all is on disk."""
        if self._syncing is not None and self._syncing.done():
            return self._syncing  # it has failed for good
        if not self._ledger.dirty:
            return self._syncing
        if self._changed is None:
            loop = asyncio.get_running_loop()
            self._changed = loop.create_future()
            self._timer = loop.call_later(self._interval, self._flush)
        return self._changed

    def _flush(self) -> None:
        """Write and sync the changes, as soon as no other sync is running."""
        self._timer = None
        self._due = self._syncing is not None
        if self._due:
            return
        try:
            last_event = self._ledger.last_event
            self._ledger.write()  # nothing comes after it that might fail: what is written must be synced
        except RillflowError as error:
            self._failed(error)
            return
        except Exception as error:
            log.exception("a commit failed")
            self._failed(StorageError(f"the ledger was not committed: {type(error).__name__}: {error}", "see the log"))
            return
        self._syncing, self._changed = self._changed, None
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.sync)
        running.add_done_callback(lambda done: self._synced(done, last_event))

    def _synced(self, done: asyncio.Future[None], event: int) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            self._break(StorageError(f"the ledger was not synced: {error}", "check the disk, then resume the run"))
            return
        try:
            self._after(event)
        except Exception:
            log.exception("what follows a commit failed")  # the commit did not: those who wait for it must be told
        settle(self._syncing)
        self._syncing = None
        if self._copying is None and self._ledger.db.changes - self._copied >= COPY_EVERY:
            self._copying = asyncio.get_running_loop().create_task(self._copy(), name="ledger-checkpoint")
        if self._due:
            self._flush()

    async def _copy(self) -> None:
        """Copy the log into the database's file, so that it begins anew."""
        loop = asyncio.get_running_loop()
        checkpoint = self._ledger.db.checkpoint
        try:
            await loop.run_in_executor(self._copier, checkpoint)
            self._closed_until = loop.create_future()
            await self.durable()
            if not await loop.run_in_executor(self._copier, checkpoint):
                log.info("the ledger's log was not copied whole: somebody reads it")
        except RillflowError as error:
            log.warning("the ledger's log could not be copied, and grows: %s", error.message)
        finally:
            self._copied = self._ledger.db.changes
            settle(self._closed_until)
            self._closed_until = self._copying = None

    def _break(self, error: RillflowError) -> None:
        for waiting in (self._syncing, self._changed):
            settle(waiting, error)
        self._changed = None  # `_syncing` stays: whoever asks is told the same
        self._forget_timer()
        self._broken(error)

    def _failed(self, error: RillflowError) -> None:
        """The open transaction was taken back: nobody who waits for it may be told that it was done."""
        waiting, self._changed = self._changed, None
        self._forget_timer()
        settle(waiting, error)


def settle(waiting: asyncio.Future[None] | None, error: RillflowError | None = None) -> None:
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
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
