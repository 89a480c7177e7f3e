"""The life of one call over HTTP: it ends with its answer, its client's going, its session's close or deadline.

Whatever ends it, the generation is aborted and its concurrency is given back. A stream's first event is awaited for
`PATIENCE` seconds before the response begins, so that a call which is refused at once is answered with its proper
status. A stream that is held for longer (it waits for another call of its session, for an engine, for weights, for its
first token) begins without an event. What goes wrong after that is said in its last event, so that no agent takes half
an answer for a whole one.

A client that stops reading makes its call wait, after a bounded number of bytes; one that reads nothing for
`Stream.stalled` seconds counts as gone. A stream in which nothing happens carries a comment when it begins and every
`QUIET` seconds, so that nobody on the way takes it for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from rillflow.contracts import Clock
from rillflow.errors import EngineError, RillflowError
from rillflow.gateway.calls import Answer
from rillflow.gateway.failures import CallRefused, session_gone, session_late
from rillflow.gateway.outbox import COMMENT, Outbox
from rillflow.gateway.sessions.session import Session
from rillflow.wire.messages import Request, Send, Stream

QUIET = 10.0
PATIENCE = 1.0
_FAULT = 500  # status from which on an error is not the agent's
_LOOK, _LONGEST_LOOK = 0.01, 1.0  # seconds between two looks at a clock that may stand still, or be moved by hand

Begin = Callable[[], Awaitable[Answer]]


class Cutting:
    """Everything that may cut the task at work on a call: `request` tells when its client has gone, `clock` when its
    session's time is over. `answer` is abandoned then, once there is one."""

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
        """The work has ended: nothing cuts the task any more."""
        self._session.at_work.pop(self._task, None)
        self._timer.cancel()
        self._forget()

    def cause(self) -> CallRefused | None:
        """Why the task was cut; None where it was not, or by someone else."""
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
        if left > 0:  # the session's clock has stood still meanwhile
            self._timer = asyncio.get_running_loop().call_later(max(left, _LOOK), self._expire)
            return
        self._late = True
        self._task.cancel()


async def whole(begin: Begin, session: Session, request: Request | None, clock: Clock) -> Answer:
    """Return the answer once it has ended, in the task of the request; raise what the work raised, or why it was cut.
    Without a `request` there is no client that could go: whoever asks is in this task."""
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
    """Server-sent events from a running call, several in one write where they wait."""

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
    """Reminds an outbox every `QUIET` seconds; one that is not waited on takes no notice."""

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
            self._outbox.remind()
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
    """Start the stream of an answer; an error after the response has begun travels in it, written by `shape`."""
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
        working.close()  # a task that is cancelled before its first turn never touches its work
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
    """What went wrong with a task that has ended."""
    if task.cancelled():
        return cutting.cause() or CallRefused("the client has gone", status=499)
    return task.exception()


def _count_fault(session: Session, error: BaseException | None) -> None:
    """Count an error of the engine or of the disk: what the agent makes of it is not the policy's doing."""
    if error is not None and _said(error).status >= _FAULT and not isinstance(error, CallRefused):
        session.faults += 1


def _said(error: BaseException) -> RillflowError:
    return error if isinstance(error, RillflowError) else EngineError(f"{type(error).__name__}: {error}")
