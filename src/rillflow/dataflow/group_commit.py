"""How changes of the ledger reach the disk: many share one sync, and `metrics.jsonl` follows."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rillflow.contracts import Clock
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.tables import NEWEST
from rillflow.errors import RillflowError, StorageError, Unavailable

log = logging.getLogger(__name__)

COPY_EVERY = 8192  # rows changed between two copies of the log: some 16 MiB of it

Waiting = list[asyncio.Future[None]]


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
        self._interval = interval
        self._after = after  # gets the number of the last event that is on the disk
        self._broken = broken
        self._error: RillflowError | None = None  # of a sync that has failed
        self._thread = ThreadPoolExecutor(1, "ledger-sync")
        self._next: Waiting = []  # the callers of the next write
        self._due = 0.0  # when that write may begin, on the loop's clock
        self._now: Waiting | None = None  # the callers of the sync at work
        self._begun = False  # a write is at work, or will begin
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
            raise _copy_of(self._error)
        loop = asyncio.get_running_loop()
        if self._ledger.dirty:
            waiting = self._next
            if not waiting:
                self._due = loop.time() + self._interval
            if not self._begun:
                self._begin_later(loop)
        elif self._now is not None:
            waiting = self._now  # what the caller tells of may not be on the disk yet
        else:
            return
        done = loop.create_future()
        waiting.append(done)
        await done

    async def close(self) -> None:
        """Wait until all changes so far are durable and acknowledged, or refused."""
        try:
            if self._copying is not None:
                await asyncio.wait([self._copying])
            with suppress(RillflowError):  # passed to the waiting callers
                await self.durable()
        finally:
            self._error = Unavailable("the ledger is closed", "start the service again")
            self._thread.shutdown()
            self._copier.shutdown()

    def _begin_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the next write when it is due: in the next turn of the loop at the earliest, so that others join."""
        self._begun = True
        if self._due > loop.time():
            loop.call_at(self._due, self._begin)
        else:
            loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Write the changes to the log and let the thread sync it."""
        if not self._next:  # they have been failed
            self._begun = False
            return
        self._now, self._next = self._next, []
        loop = asyncio.get_running_loop()
        try:
            last_event = self._write()
        except RillflowError as error:
            self._end(error)
            return
        self._thread.submit(self._sync, loop, last_event)

    def _sync(self, loop: asyncio.AbstractEventLoop, last_event: int) -> None:
        """Sync the log. Runs in the thread."""
        failed: RillflowError | None = None
        try:
            self._ledger.sync()
        except BaseException as error:
            failed = StorageError(f"the ledger was not synced: {error}", "check the disk, then resume the run")
        loop.call_soon_threadsafe(self._synced, last_event, failed)

    def _synced(self, last_event: int, error: RillflowError | None) -> None:
        if error is not None:  # acknowledge nothing any more
            self._error = error
            _settle(self._next, error)
            self._end(error)
            self._broken(error)
            return
        try:
            self._after(last_event)
        except Exception:
            log.exception("what follows a commit failed")  # its callers must be answered
        self._end()
        if self._copying is None and self._ledger.db.changes - self._copied >= COPY_EVERY:
            self._copying = asyncio.get_running_loop().create_task(self._copy(), name="ledger-checkpoint")

    def _end(self, error: RillflowError | None = None) -> None:
        """Answer the callers of the write at work, and begin the next one if it has callers."""
        waiting, self._now, self._begun = self._now or [], None, False
        _settle(waiting, error)
        if self._next:
            self._begin_later(asyncio.get_running_loop())

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

    def _abandoned(self, error: RillflowError) -> None:
        """Fail the callers that wait for the open transaction, which was rolled back."""
        waiting, self._next = self._next, []
        _settle(waiting, error)

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
            if self._closed_until is not None:
                self._closed_until.set_result(None)
            self._closed_until = self._copying = None


def _settle(waiting: Waiting, error: RillflowError | None = None) -> None:
    """Answer those who still wait, each with an error of their own: one that is raised twice would collect both
    tracebacks."""
    for one in waiting:
        if one.done():
            continue
        if error is None:
            one.set_result(None)
        else:
            one.set_exception(_copy_of(error))


def _copy_of(error: RillflowError) -> RillflowError:
    return type(error)(error.message, error.hint)


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
