"""The sandbox as its users see it: open, run, grade, close, from any thread and any event loop.

A sandbox has its own thread with an event loop, which starts all its processes. The kernel ends them when that thread
ends; a busy caller or the end of the caller's loop does not affect them. `check` tries whether the promises of an
isolation hold on this machine.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeVar

from rillflow.agents.sandbox.interface import Asserts, Result, SandboxConfig, Tests, Verdict
from rillflow.agents.sandbox.running import Pool, grade, run_program
from rillflow.errors import SandboxError

_T = TypeVar("_T")
_CLOSE = 30.0  # seconds
_CLOSED = "the sandbox was closed while code ran in it"


class Sandbox:
    """A pool of isolated processes. `run` and `grade` never raise for what the code does; a SandboxError means that
    they have no result."""

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


_TESTS = Asserts(("assert double(3) == 6", "assert double(-4) == -8"))
_SECONDS = 30.0


class Finding(NamedTuple):
    """A promise, and whether it holds."""

    promise: str
    holds: bool


def check(isolation: Literal["bubblewrap", "process"]) -> list[Finding]:
    """Start a sandbox and try each promise; SandboxError if it does not start."""
    with (
        Sandbox(SandboxConfig(isolation=isolation, memory=256, seconds=_SECONDS)) as sandbox,
        tempfile.NamedTemporaryFile(prefix="rillflow-") as ours,
    ):
        programs = _programs(ours.name)
        findings = [Finding(promise, sandbox.run_sync(code).value == "True") for promise, code in programs.items()]
        findings += [
            Finding(promise, sandbox.grade_sync(code, _TESTS).ok is wanted)
            for promise, (code, wanted) in _CANDIDATES.items()
        ]
        late = sandbox.run_sync("import time\ntime.sleep(1000)", seconds=0.5)
        long = sandbox.run_sync("while True: print('x' * 1000)")
    ended = [Finding("what does not end is ended", late.status == "timeout")]
    return [*findings, *ended, Finding("output is bounded", long.status == "output")]


def _programs(ours: str) -> dict[str, str]:
    """Return programs whose last value is True if the promise holds."""
    fails = "def fails(act, *arguments):\n    try:\n        act(*arguments)\n    except (OSError, MemoryError):\n"
    fails += "        return True\n    return False\nimport os, socket\n"
    forks = (
        "import time\nmade = 0\ntry:\n    while made < 40:\n        if os.fork() == 0:\n            time.sleep(100)\n"
    )
    forks += "        made += 1\nexcept OSError:\n    pass\nmade < 40"
    user = os.environ.get("USER", "-")
    return {
        "a user without rights": fails + "os.getuid() == 65534 and fails(os.setuid, 0)",
        "no files of ours": fails + f"fails(open, {ours!r})",
        "the system is read-only": fails + "fails(open, '/usr/mine', 'w') and fails(open, '/mine', 'w')",
        "no processes of others": "import os\n{name for name in os.listdir('/proc') if name.isdigit()} == {'1'}",
        "no environment of ours": f"import os\nlen(os.environ) < 12 and os.environ.get('USER') != {user!r}",
        "no network": fails + "fails(socket.socket, socket.AF_INET) and fails(socket.socket, socket.AF_VSOCK)",
        "a filter of system calls": "'Seccomp:\\t2' in open('/proc/self/status').read()",
        "memory is bounded": fails + "fails(bytearray, 1 << 30)",
        "processes are bounded": fails + forks,
    }


_CANDIDATES = {
    "an honest solution passes": ("def double(x):\n    return x + x", True),
    "leaving early passes nothing": ("import os\nos._exit(0)", False),
    "what is equal to everything passes nothing": (
        "class Equal(int):\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Equal()",
        False,
    ),
}
