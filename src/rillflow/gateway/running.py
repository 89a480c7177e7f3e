"""The life of one call over HTTP: it ends with its answer, its client's going, its session's close or deadline.

Whatever ends it, the generation is aborted and its concurrency is given back. A stream's first event is awaited
before the response begins, so that a call which cannot be served is still answered with its proper status; one that
is cut later says why in its last event, so that no agent takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rillflow.errors import EngineError, RillflowError
from rillflow.gateway.calls import Answer
from rillflow.gateway.failures import CallRefused, session_gone, session_late
from rillflow.gateway.session import Session


class Running:
    """A call's task, with everything that may cut it. `seconds` are those left to its session."""

    def __init__(
        self,
        work: Coroutine[Any, Any, None],
        abandon: Callable[[], None],
        session: Session,
        request: Request,
        seconds: float,
    ) -> None:
        self._session = session
        self._task = asyncio.create_task(_limited(work, session, seconds))
        self._watch = asyncio.create_task(_cut_when_gone(request.receive, self._task))
        session.at_work[self._task] = abandon
        self._task.add_done_callback(lambda task: session.at_work.pop(task, None))
        # A task that is cancelled before its first turn never touches its work.
        self._task.add_done_callback(lambda _: work.close())

    def when_done(self, tell: Callable[[BaseException | None], None]) -> None:
        """Tell what went wrong, or None, once the call has ended, whatever ended it."""
        self._task.add_done_callback(lambda _: tell(self._failure()))

    async def result(self) -> None:
        """Wait for the end; raises what the work raised, or why it was cut."""
        try:
            await asyncio.wait({self._task})
        finally:
            self.stop()
        error = self._failure()
        if error is not None:
            raise error

    def _failure(self) -> BaseException | None:
        if not self._task.cancelled():
            return self._task.exception()
        if self._session.closed:
            return session_gone(self._session.id)
        return CallRefused("the client has gone", status=499)

    def stop(self) -> None:
        self._watch.cancel()
        self._task.cancel()


async def _limited(work: Coroutine[Any, Any, None], session: Session, seconds: float) -> None:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await work
    except TimeoutError:
        if limit.expired():
            raise session_late(session.id) from None
        raise


async def _cut_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def whole(answer: Answer, session: Session, request: Request, seconds: float) -> None:
    await Running(answer.whole(), answer.abandon, session, request, seconds).result()


class EventStream(Response):
    """Server-sent events from a running call."""

    def __init__(self, running: Running, queue: asyncio.Queue[bytes | None], first: bytes | None) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._running = running
        self._queue = queue
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            item = self._first
            while item is not None:
                await send({"type": "http.response.body", "body": item, "more_body": True})
                item = await self._queue.get()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._running.stop()


async def streamed(
    answer: Answer,
    events: AsyncGenerator[bytes],
    session: Session,
    request: Request,
    seconds: float,
    *,
    shape: Callable[[RillflowError], bytes],
) -> EventStream:
    """Start the stream of `answer`; an error after its first event travels in it, written by `shape`."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    begun = False

    async def work() -> None:
        nonlocal begun
        async with aclosing(events):
            async for data in events:
                begun = True
                queue.put_nowait(data)

    def end(error: BaseException | None) -> None:
        if error is not None and begun:
            queue.put_nowait(shape(_said(error)))
        queue.put_nowait(None)

    running = Running(work(), answer.abandon, session, request, seconds)
    running.when_done(end)
    try:
        first = await queue.get()
    except BaseException:
        running.stop()
        raise
    if first is None:
        await running.result()
    return EventStream(running, queue, first)


def _said(error: BaseException) -> RillflowError:
    return error if isinstance(error, RillflowError) else EngineError(f"{type(error).__name__}: {error}")
