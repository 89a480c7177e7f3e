"""The lifetime of one call over HTTP: it ends with its answer, when its client goes, or with its session.

Whatever ends a call, its generation is aborted and its place among the session's calls is free again. The first event
of a stream is awaited for `PATIENCE` seconds before the response begins, so that a call which is refused at once gets
its proper status. A stream that waits longer (for another call of its session, for an engine, for weights, for its
first token) begins without an event. A later error is the last event of the stream, so that no agent takes half an
answer for a whole one.

A client that stops reading makes its call wait, after a bounded number of bytes; a client that reads nothing for
`Stream.stalled` seconds counts as gone. A quiet stream carries a comment when it begins and every `QUIET` seconds, so
that no proxy takes it for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from rillflow.contracts import Clock
from rillflow.errors import EngineError, RillflowError
from rillflow.gateway.answers import Answer
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.shapes import CallRefused, session_gone, session_late
from rillflow.wire.messages import Request, Send, Stream

QUIET = 10.0
PATIENCE = 1.0
BOUND = 64 << 10  # bytes that may wait until the call has to wait
COMMENT = b": keep-alive\n\n"  # clients skip lines that begin with a colon
_FAULT = 500  # the lowest status of errors that are not the agent's
_LOOK, _LONGEST_LOOK = 0.01, 1.0  # seconds between two readings of a clock that may stand still, or jump in tests

Begin = Callable[[], Awaitable[Answer]]


class Cutting:
    """Cancels the task of a call when its client goes (`request`) or its session's time is over (`clock`).

    `answer`, once it is set, is abandoned then.
    """

    def __init__(self, task: asyncio.Task[Any], session: Session, request: Request | None, clock: Clock) -> None:
        self.answer: Answer | None = None
        self._task = task
        self._session = session
        self._clock = clock
        self._late = False
        self._timer = asyncio.get_running_loop().call_later(self._left(), self._expire)
        self._request = request
        self._forget: Callable[[], None] = lambda: None
        if request is not None:
            self._forget = request.when_lost(task.cancel)
        if request is not None and request.lost:
            task.cancel()
        session.at_work[task] = self._abandon

    def release(self) -> None:
        """Cancel nothing any more; the call has ended."""
        self._session.at_work.pop(self._task, None)
        self._timer.cancel()
        self._forget()

    def cause(self) -> CallRefused | None:
        """Return why the task was cancelled here; None if it was not."""
        if self._session.closed:
            return session_gone(self._session.id)
        if self._late:
            return session_late(self._session.id)
        gone = self._request is not None and self._request.lost
        return CallRefused("the client has gone", status=499) if gone else None

    def _abandon(self) -> None:
        if self.answer is not None:
            self.answer.abandon()

    def _left(self) -> float:
        return self._session.deadline - self._clock.monotonic()

    def _expire(self) -> None:
        left = self._left()
        if left > 0:  # the session's clock stood still meanwhile
            self._timer = asyncio.get_running_loop().call_later(max(left, _LOOK), self._expire)
            return
        self._late = True
        self._task.cancel()


async def whole(begin: Begin, session: Session, request: Request | None, clock: Clock) -> Answer:
    """Return the answer once it has ended. Raises the error of the call, or why it was cancelled.

    The call runs in the current task. A call from this process has no `request`.
    """
    task = asyncio.current_task()
    assert task is not None
    cutting = Cutting(task, session, request, clock)
    try:
        async with session.places:
            answer = cutting.answer = await begin()
            await answer.whole()
            return answer
    except asyncio.CancelledError:
        cause = cutting.cause()
        if cause is None:
            raise
        task.uncancel()
        raise cause from None
    except Exception as error:
        _count_fault(session, error)
        raise
    finally:
        cutting.release()


class EventStream(Stream):
    """Server-sent events from a running call. Events that wait are sent in one write."""

    def __init__(self, task: asyncio.Task[None], outbox: Outbox, first: bytes, clock: Clock) -> None:
        super().__init__(media_type="text/event-stream; charset=utf-8", headers={"cache-control": "no-cache"})
        self._task = task
        self._outbox = outbox
        self._first = first
        self._clock = clock

    async def write(self, send: Send) -> None:
        try:
            with _Pulse(self._outbox, self._clock):
                data = self._first
                while data:
                    await send(data)
                    data = await self._outbox.take()
        finally:
            self._task.cancel()


class _Pulse:
    """Adds a comment to an idle outbox every `QUIET` seconds."""

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock

    def __enter__(self) -> None:
        self._due = self._clock.monotonic() + QUIET
        self._look_later()

    def __exit__(self, *_: object) -> None:
        self._next.cancel()

    def _look_later(self) -> None:
        wait = min(max(self._due - self._clock.monotonic(), _LOOK), _LONGEST_LOOK)
        self._next = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        now = self._clock.monotonic()
        if now >= self._due:
            self._outbox.add_comment()
            self._due = now + QUIET
        self._look_later()


async def streamed(
    begin: Begin,
    events: Callable[[Answer], AsyncGenerator[bytes]],
    session: Session,
    request: Request,
    clock: Clock,
    *,
    shape: Callable[[RillflowError], bytes],
) -> EventStream:
    """Start the stream of an answer. An error after the response has begun is sent in it, written by `shape`."""
    outbox = Outbox()
    begun = False

    async def work() -> None:
        nonlocal begun
        async with session.places:
            answer = cutting.answer = await begin()
            async with aclosing(events(answer)) as written:
                async for data in written:
                    begun = True
                    await outbox.put(data)

    def ended(task: asyncio.Task[None]) -> None:
        working.close()  # a task that is cancelled before it runs never awaits its coroutine
        cutting.release()
        error = _failure(task, cutting)
        _count_fault(session, error)
        outbox.end(shape(_said(error)) if error is not None and begun else b"")

    working = work()
    task = asyncio.create_task(working)
    cutting = Cutting(task, session, request, clock)
    task.add_done_callback(ended)
    try:
        async with asyncio.timeout(PATIENCE):
            first = await outbox.take()
    except TimeoutError:
        first = COMMENT
        if not task.done():
            begun = True
        elif not begun:
            first = b""
    except BaseException:
        task.cancel()
        raise
    error = None if first else _failure(task, cutting)
    if error is not None:
        raise error
    return EventStream(task, outbox, first, clock)


def _failure(task: asyncio.Task[None], cutting: Cutting) -> BaseException | None:
    """Return the error of a task that has ended."""
    if task.cancelled():
        return cutting.cause() or CallRefused("the client has gone", status=499)
    return task.exception()


def _count_fault(session: Session, error: BaseException | None) -> None:
    """Count an error of the engine or the disk, whose effect on the episode is not the policy's fault."""
    if error is not None and _said(error).status >= _FAULT and not isinstance(error, CallRefused):
        session.faults += 1


def _said(error: BaseException) -> RillflowError:
    return error if isinstance(error, RillflowError) else EngineError(f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- events that wait for the client


class Outbox:
    """A bounded queue of bytes with one writer and one reader. After `end` the reader gets the rest, then nothing.

    A connection that does not keep up makes the call wait, so memory does not grow.
    """

    def __init__(self, bound: int = BOUND) -> None:
        self._bound = bound
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Add data, and return once there is room for more. The reader bounds the time."""
        self._add(data)
        while self._size >= self._bound:
            self._taken.clear()
            await self._taken.wait()

    def add_comment(self) -> None:
        """Add a comment if the outbox is empty, for a reader that waits."""
        if not self._parts and not self._ended:
            self._add(COMMENT)

    def end(self, last: bytes = b"") -> None:
        self._add(last)
        self._ended = True
        self._filled.set()

    async def take(self) -> bytes:
        """Return everything that waits, at least one event; empty after the end."""
        if not self._parts and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._taken.set()
        return data

    def _add(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._size += len(data)
            self._filled.set()
