"""The setup of every process of a run: it dies with its parent, logs to its file, and stops on SIGTERM."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rillflow.errors import RunError

if TYPE_CHECKING:
    from rillflow.config import Recipe

# The exit code of a process that would end the same way again: the supervisor does not start it another time.
GIVE_UP = 3
# The code of a process that a signal has ended: it has not finished, and is restarted if it is still wanted.
STOPPED = 128 + signal.SIGTERM
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_held: list[int] = []
_PR_SET_PDEATHSIG = 1
PARENT_ENV = "RILLFLOW_PARENT"
HOST_ENV = "RILLFLOW_HOST"
_ORPHAN_POLL = 1.0

log = logging.getLogger(__name__)


class GiveUp(RunError):
    """The run cannot continue, and a restart of this process would not help."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals that ask to stop until `was_asked_to_stop` is called, so that none is lost during a start.

    Not by masks: a signal to the process goes to any thread that lets it in, and libraries have threads.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = {number: signal.signal(number, _hold) for number in STOP_SIGNALS if not ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _held.clear()


def ignored(number: signal.Signals) -> bool:
    """Return whether a signal stays ignored: `nohup` lets a run outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def was_asked_to_stop() -> bool:
    return bool(_held)


def _hold(number: int, frame: FrameType | None) -> None:
    _held.append(number)


def bind_host(recipe: Recipe) -> str:
    """Return the address that this process listens on: its host's, if a cluster has placed it there."""
    return os.environ.get(HOST_ENV) or recipe.runtime.host


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment of a supervised process: with its parent's pid and its libraries' share of the cores."""
    return os.environ | role_environment(threads) | {PARENT_ENV: str(os.getpid())}


def role_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of every process of a run, wherever it runs."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "HF_HUB_DISABLE_PROGRESS_BARS": os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        # For torch's allocator on ARM: memory that is returned at once is requested again by the next operator.
        "MIMALLOC_PURGE_DELAY": os.environ.get("MIMALLOC_PURGE_DELAY", "10000"),
    }
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def prepare(*, may_fork: bool = False) -> None:
    """Prepare a role's process; call this first. A process that `may_fork` gets no thread, so it relies on the kernel
    alone to learn of its parent's death."""
    from rillflow.config.secrets import SecretFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SecretFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for library in ("httpx", "httpx2", "openai"):  # a line for each call would drown everything else
        logging.getLogger(library).setLevel(logging.WARNING)
    faulthandler.enable()
    parent = int(os.environ.get(PARENT_ENV, "0"))
    if parent:
        _die_with(parent, look=not may_fork or sys.platform != "linux")


def _die_with(parent: int, *, look: bool) -> None:
    """Send SIGTERM to this process when the supervisor dies: by the kernel, or by a check every second."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before this call
            raise SystemExit(STOPPED)
    if look:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL)
    log.warning("the supervisor has died: stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3 * _ORPHAN_POLL)
    os._exit(1)


def leave(code: int) -> NoReturn:
    """End the process at once. Threads of users' code that never return, and threads of native libraries, cannot change
    its exit code."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_until_signal(main: Coroutine[Any, Any, None]) -> int:
    """Run `main`; SIGTERM or SIGINT cancels it. Returns the code that the process ends with."""
    import asyncio

    async def guarded() -> int:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            log.info("stopped by signal")
            return STOPPED
        return 0

    return asyncio.run(guarded())


class LoopWatchdog:
    """Ends a process whose event loop is blocked: all stacks go to the log, then the supervisor restarts it.

    A workflow that blocks (`time.sleep`, an endless loop) would otherwise hold every other episode of its node.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def run(self) -> None:
        import asyncio

        try:
            while True:
                faulthandler.dump_traceback_later(self._seconds, exit=True)
                await asyncio.sleep(min(1.0, self._seconds / 4))
        finally:
            faulthandler.cancel_dump_traceback_later()
