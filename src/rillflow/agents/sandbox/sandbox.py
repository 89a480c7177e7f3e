"""The sandbox as its users see it: open, run, grade, close, from any thread and any event loop.

A sandbox has its own thread with an event loop, which starts all its processes. The kernel ends them when that thread
ends; a busy caller or the end of the caller's loop does not affect them.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Self, TypeVar

from rillflow.agents.sandbox.grade import grade
from rillflow.agents.sandbox.interface import Result, SandboxConfig, Verdict
from rillflow.agents.sandbox.pool import Pool
from rillflow.agents.sandbox.program import run_program
from rillflow.agents.sandbox.tests import Tests
from rillflow.errors import SandboxError

_T = TypeVar("_T")
_CLOSE = 30.0  # seconds
_CLOSED = "the sandbox was closed while code ran in it"


class Sandbox:
    """A pool of isolated processes. `run` and `grade` never raise for what the code does; a SandboxError means that
    there is no result."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Pool | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> Self:
        """Start the sandbox; an error says what the isolation lacks. Opening an open sandbox does nothing."""
        with self._lock:
            if self._pool is not None:
                return self
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
            self._thread.start()
            try:
                self._pool = self._sync(self._start())
            except BaseException:
                self._stop()
                raise
        return self

    def close(self) -> None:
        """End all processes; a run that is under way ends with a SandboxError."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                self._sync(pool.close())
                self._stop()

    async def run(
        self, code: str, *, stdin: str = "", seconds: float | None = None, files: Mapping[str, str] | None = None
    ) -> Result:
        """Run a program and return its result. `files` are written before it starts, by relative path."""
        work = run_program(self._opened(), code, stdin, seconds or self.config.seconds, files or {})
        return await self._async(work)

    async def grade(self, candidate: str, tests: Tests, *, seconds: float | None = None) -> Verdict:
        """Return which tests the candidate's code passes."""
        return await self._async(grade(self._opened(), candidate, tests, seconds or self.config.seconds))

    def run_sync(self, code: str, **options: Any) -> Result:
        """As `run`, for code without an event loop."""
        return asyncio.run(self.run(code, **options))

    def grade_sync(self, candidate: str, tests: Tests, *, seconds: float | None = None) -> Verdict:
        """As `grade`, for code without an event loop."""
        return asyncio.run(self.grade(candidate, tests, seconds=seconds))

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.open)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _start(self) -> Pool:
        return Pool(self.config)

    def _opened(self) -> Pool:
        pool = self._pool
        if pool is None:
            raise SandboxError("the sandbox is not open", "call `open`, or use it in a `with` block")
        return pool

    async def _async(self, work: Coroutine[Any, Any, _T]) -> _T:
        loop, task = self._loop, asyncio.current_task()
        assert loop is not None
        assert task is not None
        try:
            result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            raise SandboxError(_CLOSED) from None
        if self._pool is None:  # we ended it, so the result says nothing about the code
            raise SandboxError(_CLOSED)
        return result

    def _sync(self, work: Coroutine[Any, Any, _T]) -> _T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        """Let tasks end, then end the thread."""
        assert self._loop is not None
        assert self._thread is not None
        self._sync(_drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE)
        self._loop.close()
        self._loop = self._thread = None


async def _drain() -> None:
    """Wait until this loop has no other task; tasks that take too long are cancelled."""
    deadline = time.monotonic() + _CLOSE
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        if time.monotonic() > deadline:
            for task in tasks:
                task.cancel()
        await asyncio.wait(tasks, timeout=1.0)


_shared: dict[tuple[int, SandboxConfig], Sandbox] = {}
_sharing = threading.Lock()


def shared(config: SandboxConfig | None = None) -> Sandbox:
    """Return the open sandbox of this process with these settings; it is closed when the process ends."""
    key = (os.getpid(), config or SandboxConfig())  # after a fork, the parent's sandboxes are not ours
    with _sharing:
        if key not in _shared:
            _shared[key] = Sandbox(key[1])
        return _shared[key].open()


@atexit.register
def close_shared() -> None:
    """Close the shared sandboxes of this process."""
    with _sharing:
        for owner, config in list(_shared):
            if owner == os.getpid():
                _shared.pop((owner, config)).close()
