"""Event loops and threads: a loop in a thread for synchronous code (a trainer's heartbeats go on during its step),
threads for work that would block a loop, the signal that wakes long polls, and the garbage collector of a process that
serves.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_TURN_SECONDS = 0.0005
_YOUNG = 10_000  # new objects until a collection; Python's own 700 are a few calls
_MOST_IDLE = 16  # daemon threads that are kept for later work


def take_short_turns() -> None:
    """Shorten the interpreter's switch interval, for a process whose event loop is busy while threads work.

    Each operation of a thread releases the interpreter lock and waits for one switch interval to get it back: Python's
    5 ms, some thousand times for one version of a model's weights."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _TURN_SECONDS))


class LoopThread:
    """Runs coroutines for synchronous code. Every wait has a deadline."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """The result of `work`, or TimeoutError after `deadline` seconds (the work is cancelled)."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        self.run(self._cancel_all(), 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(work: Callable[[], T], executor: Executor | None = None) -> T:
    """Run `work` in a thread and return its result. The work has ended when this returns, even if the caller is
    cancelled, so its resources may then be closed. Not for work that may hang."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


async def in_daemon(
    work: Callable[[], T],
    name: str,
    *,
    exited: Callable[[BaseException], Exception],
    ended: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of `work`, run in a daemon thread: work that never returns blocks nothing, not even the exit of
    the process. A StopIteration is raised as RuntimeError, as in a coroutine. `exited` converts a BaseException that is
    not an Exception, such as SystemExit. `ended` is called on the loop once the work has ended, even if the caller no
    longer waits."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: list[T], error: Exception | None) -> None:
        ended()
        if future.done():
            return
        if error is None:
            future.set_result(result[0])
        else:
            future.set_exception(error)

    def run() -> None:
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except StopIteration as error:  # a future cannot hold a StopIteration
            failure = RuntimeError(f"StopIteration: {error}")
            failure.__cause__ = error
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = exited(error)
        with suppress(RuntimeError):  # the loop has closed: the caller no longer waits
            loop.call_soon_threadsafe(settle, result, failure)

    _start(run, name)
    return await future


_idle: deque[SimpleQueue[tuple[Callable[[], None], str]]] = deque()  # where daemon threads wait for their next work
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of the threads


def _start(work: Callable[[], None], name: str) -> None:
    """Run `work` in an idle daemon thread, or in a new one. Starting a thread costs more than most rewards, because the
    starter waits until it runs."""
    try:
        queue = _idle.pop()
    except IndexError:
        queue = SimpleQueue()
        threading.Thread(target=_work_on, args=(queue,), daemon=True).start()
    queue.put((work, name))


def _work_on(queue: SimpleQueue[tuple[Callable[[], None], str]]) -> None:
    thread = threading.current_thread()
    while True:
        work, thread.name = queue.get()
        work()
        del work  # and with it what it refers to
        thread.name = "idle"
        if len(_idle) >= _MOST_IDLE:
            return
        _idle.append(queue)


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


def keep_what_is_there() -> None:
    """Exclude all present objects from later collections. Call once, when a process is ready: modules, models and
    templates stay, and every full collection would delay all calls, or a step, to visit them again."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Let collections wait for more new objects, in a process that serves many calls at once.

    What a call needs lives as long as the call. Frequent collections visit it several times and find nothing to free.
    """
    gc.set_threshold(_YOUNG)
