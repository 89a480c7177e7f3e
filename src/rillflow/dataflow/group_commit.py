"""How changes of the ledger reach the disk: many share one sync, and `metrics.jsonl` follows."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rillflow.batching import Batcher
from rillflow.contracts import Clock
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.tables import NEWEST
from rillflow.errors import RillflowError, StorageError

log = logging.getLogger(__name__)

COPY_EVERY = 8192  # rows changed between two copies of the log: some 16 MiB of it
_MOST_WAITING = 1 << 20  # callers of one sync: all of them


class GroupCommit:
    """Many callers, one fsync: a reply goes out only after the sync that contains its change.

    Changes are written to the log together, at most every `interval` seconds. A thread syncs the log; changes made
    during a sync are written when it ends, so each write has exactly one sync. After a failed sync the state of the
    disk is unknown: nothing is acknowledged any more and `broken` is called.

    Another thread copies the log into the database's file, now and then: most of it while changes go on. The log can be
    reset only when all of it is copied and no transaction is open, so new changes wait in `room` while the rest, which
    is short, is copied.
    """

    def __init__(
        self,
        ledger: Ledger,
        interval: float,
        after: Callable[[int], None],
        broken: Callable[[RillflowError], None] = lambda error: None,
    ) -> None:
        self._ledger = ledger
        self._after = after  # gets the number of the last event that is on the disk
        self._broken = broken
        self._error: RillflowError | None = None  # of a sync that has failed
        self._thread = ThreadPoolExecutor(1, "ledger-sync")
        self._changes: Batcher[None, None] = Batcher(self._save, most=_MOST_WAITING, pause=interval)
        self._syncing: asyncio.Future[None] | None = None
        self._copier = ThreadPoolExecutor(1, "ledger-checkpoint")
        self._copying: asyncio.Task[None] | None = None
        self._closed_until: asyncio.Future[None] | None = None  # the end of the last part of a copy
        self._copied = ledger.db.changes
        ledger.db.checkpoint_beside()
        ledger.on_abandon = self._abandoned

    async def room(self) -> None:
        """Return when changes may be made."""
        while self._closed_until is not None:
            await asyncio.shield(self._closed_until)

    async def durable(self) -> None:
        """Return when every transition made so far is on disk; raise what the disk said when it is not."""
        if self._error is not None:
            raise type(self._error)(self._error.message, self._error.hint)
        if self._ledger.dirty:
            await asyncio.shield(self._changes.submit(None))  # a caller that goes away takes no write with it
        elif self._syncing is not None:
            await asyncio.shield(self._syncing)

    async def close(self) -> None:
        """Wait until all changes so far are durable and acknowledged, or refused."""
        try:
            if self._copying is not None:
                await asyncio.wait([self._copying])
            with suppress(RillflowError):  # passed to the waiting callers
                await self.durable()
        finally:
            await self._changes.close(finish=True)
            self._thread.shutdown()
            self._copier.shutdown()

    async def _save(self, callers: Sequence[None]) -> Sequence[None]:
        """Write the changes to the log and sync it. Those who change nothing meanwhile wait for the sync, too."""
        last_event = self._write()
        loop = asyncio.get_running_loop()
        self._syncing = loop.create_future()
        try:
            await loop.run_in_executor(self._thread, self._ledger.sync)
        except (Exception, asyncio.CancelledError) as error:
            raise self._break(
                StorageError(f"the ledger was not synced: {error}", "check the disk, then resume the run")
            ) from error
        try:
            self._after(last_event)
        except Exception:
            log.exception("what follows a commit failed")  # the commit failed: its callers must be informed
        _settle(self._syncing)
        self._syncing = None
        if self._copying is None and self._ledger.db.changes - self._copied >= COPY_EVERY:
            self._copying = loop.create_task(self._copy(), name="ledger-checkpoint")
        return [None] * len(callers)

    def _write(self) -> int:
        """Write the changes to the log; returns the number of the last event."""
        try:
            last_event = self._ledger.last_event
            self._ledger.write()  # nothing after it may fail: a written change must be synced
        except RillflowError:
            raise
        except Exception as error:
            log.exception("a commit failed")
            why = f"the ledger was not committed: {type(error).__name__}: {error}"
            raise StorageError(why, "see the log") from error
        return last_event

    def _break(self, error: RillflowError) -> RillflowError:
        """Acknowledge nothing any more."""
        self._error = error
        self._changes.fail_waiting(error)
        _settle(self._syncing, error)
        self._broken(error)
        return error

    def _abandoned(self, error: RillflowError) -> None:
        """Fail the callers that wait for the open transaction, which was rolled back."""
        self._changes.fail_waiting(error)

    async def _copy(self) -> None:
        """Copy the log into the database's file, so that it can be reset."""
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
            _settle(self._closed_until)
            self._closed_until = self._copying = None


def _settle(waiting: asyncio.Future[None] | None, error: RillflowError | None = None) -> None:
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
        waiting.exception()  # seen, also when all who waited have gone away


class Watch:
    """Notices periods in which this process did not run: deadlines that passed in them do not count against others."""

    def __init__(self, clock: Clock, most: float) -> None:
        self._clock = clock
        self._most = most
        self._wall, self._steady = clock.now(), clock.monotonic()

    def disturbed(self) -> bool:
        """Return whether this process stood still, or the wall clock was set, since the last call."""
        wall, steady = self._wall, self._steady
        self._wall, self._steady = self._clock.now(), self._clock.monotonic()
        passed = self._steady - steady
        return passed > self._most or abs(self._wall - wall - passed) > self._most


# ---------------------------------------------------------------- metrics.jsonl


class Journal:
    """`metrics.jsonl`: one line per committed step, evaluation and rollback, each exactly once.

    The lines are written to the ledger with the change they tell of; this file is a copy for people and plots. Every
    line has its number `seq`, so after a crash the copy goes on where it stopped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = self._mend()
        self._torn = False  # the file may end in half a line

    def _mend(self) -> int:
        """The number of the last whole line; a torn rest after it is truncated, which needs no space."""
        if not self._path.exists():
            return 0
        lines = self._path.read_bytes().splitlines(keepends=True)
        while lines and not _number(lines[-1]):
            lines.pop()
        os.truncate(self._path, sum(len(line) for line in lines))
        return _number(lines[-1]) if lines else 0

    def catch_up(self, ledger: Ledger, until: int = NEWEST) -> None:
        """Append the lines to number `until`, which are durable. A disk that refuses is reported and tried again."""
        if until <= self._last and not self._torn:
            return
        try:
            if self._torn:
                self._last, self._torn = self._mend(), False
            news = ledger.events_after(self._last, until)
            if not news:
                return
            self._torn = True
            with open(self._path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for _, line in news))
            self._last, self._torn = news[-1][0], False
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error)


def _number(line: bytes) -> int:
    """Return the line's `seq`; 0 if it is not a whole line."""
    try:
        value = json.loads(line)
    except ValueError:
        return 0
    number = value.get("seq") if isinstance(value, dict) else None
    return number if isinstance(number, int) and line.endswith(b"\n") else 0
