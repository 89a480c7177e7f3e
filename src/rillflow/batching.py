"""Callers that come at the same time share one call.

Clients share calls to the dataflow service, puts share a write of their storage unit, the frames of a session log share
a sync, and so do the changes of a ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from rillflow.errors import RillflowError, Unavailable, WireError

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MOST = 256  # items of one call


@dataclass(slots=True)
class _Waiting(Generic[Item, Answer]):
    item: Item
    size: int
    answer: asyncio.Future[Answer]


class Batcher(Generic[Item, Answer]):
    """Calls `work` with the items of everybody who waits, with at most `at_once` calls under way.

    Items that come meanwhile share the next call, in their order: up to `most` of them, and up to `most_size` in the
    unit of their sizes unless one alone has more. `work` answers each item with its result or with an error of its own,
    in the same order; when it raises, each of its items gets a copy of the error. An item whose caller has stopped
    waiting before its call begins is left out. Belongs to one event loop.
    """

    def __init__(
        self,
        work: Callable[[list[Item]], Awaitable[Sequence[Answer | RillflowError]]],
        *,
        at_once: int = 1,
        most: int = MOST,
        most_size: int | None = None,
    ) -> None:
        self._work = work
        self._at_once = at_once
        self._most = most
        self._most_size = most_size
        self._waiting: list[_Waiting[Item, Answer]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None  # has not taken its first items yet
        self._closed = False
        self.size = 0  # of items that wait or are under way

    def submit(self, item: Item, size: int = 0) -> asyncio.Future[Answer]:
        """Return a future of the item's answer. Its call begins in the next turn of the loop at the earliest."""
        if self._closed:
            raise _closed()
        waiting: _Waiting[Item, Answer] = _Waiting(item, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.size += size
        self._start()
        return waiting.answer

    def fail_waiting(self, error: RillflowError) -> list[Item]:
        """Fail every item whose call has not begun; return these items."""
        waiting, self._waiting = self._waiting, []
        self._end(waiting, error)
        return [one.item for one in waiting]

    async def close(self, *, finish: bool) -> None:
        """Refuse new items; `finish` those that wait, or fail everything that has no answer yet."""
        self._closed = True
        if not finish:
            for task in self._running:
                task.cancel()
        while self._running:
            ended, _ = await asyncio.wait(tuple(self._running))  # they go on should the caller be cancelled
            self._running -= ended
        self.fail_waiting(_closed())

    def _start(self) -> None:
        """Begin a call, unless one begins already or as many as may be are under way."""
        if len(self._running) < self._at_once and (self._starting is None or self._starting.done()):
            self._starting = task = asyncio.create_task(self._run(), name="batches")
            self._running.add(task)
            task.add_done_callback(self._running.discard)  # for one that is cancelled before it begins

    async def _run(self) -> None:
        self._starting = None
        try:
            while self._waiting:
                group = self._next_group()
                if self._waiting:
                    self._start()
                await self._call(group)
        finally:
            # At once, not when the loop comes round to it: the next item must not count on this task.
            self._running.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _next_group(self) -> list[_Waiting[Item, Answer]]:
        size = count = 0
        for one in self._waiting[: self._most]:
            if count and self._most_size is not None and size + one.size > self._most_size:
                break
            size, count = size + one.size, count + 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    async def _call(self, group: list[_Waiting[Item, Answer]]) -> None:
        wanted = [one for one in group if not one.answer.done()]
        try:
            answers = await self._work([one.item for one in wanted]) if wanted else []
            if len(answers) != len(wanted):
                raise WireError(f"{len(answers)} answers to {len(wanted)} calls", "the peer is of another version")
        except RillflowError as error:
            self._end(group, error)
        except Exception as error:
            log.exception("a call with %d items failed", len(wanted))
            self._end(group, WireError(f"a call failed: {type(error).__name__}: {error}", "see the log"))
        except BaseException:
            self._end(group, _closed())
            raise
        else:
            for one, answer in zip(wanted, answers, strict=True):
                _settle(one.answer, answer)
            self.size -= sum(one.size for one in group)

    def _end(self, group: Sequence[_Waiting[Item, Answer]], error: RillflowError) -> None:
        """Give everybody in the group an error of their own: one that is raised twice would collect both tracebacks."""
        for one in group:
            _settle(one.answer, type(error)(error.message, error.hint))
        self.size -= sum(one.size for one in group)


def _settle(waiting: asyncio.Future[Answer], answer: Answer | RillflowError) -> None:
    if waiting.done():
        return
    if isinstance(answer, RillflowError):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)


def _closed() -> Unavailable:
    return Unavailable("closed before there was an answer", "make a new client")
