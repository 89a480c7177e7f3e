"""Forking a process that has imported torch, so that the new one does not import it again.

Invariants: only a process of one thread and without a CUDA context forks; a forked process has no file of its parent
but its log, begins with the default signals, and ends by itself, never in its parent's code.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import setproctitle

_PR_SET_PDEATHSIG = 1
_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def unsafe() -> str | None:
    """Return why this process must not fork, or None. Children of a process with threads inherit their locks."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"it has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has a CUDA context"
    return None


def worthwhile() -> bool:
    """Return whether a process forked from this one starts sooner than a new one, and safely."""
    return sys.platform == "linux" and "torch" in sys.modules and unsafe() is None


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Turn a process that was just forked into the one that `python -m rillflow ARGUMENTS` would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    setproctitle.setproctitle(" ".join([sys.executable, "-m", "rillflow", *arguments]))
    os.environ.clear()  # after the title, whose place is found by the environment
    os.environ.update(environment)
    sys.argv = ["rillflow", *arguments]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(None)  # as a new process does; `random` does so at each fork, torch has a fixed seed
    runpy.run_module("rillflow", run_name="__main__", alter_sys=True)


def write_to(log: Path | None) -> None:
    """Let standard output and error go to `log`, or stay; nothing can be read from standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)


class ForkedChild:
    """A child of this process that runs `rillflow ARGUMENTS`; as of `subprocess.Popen`: poll, wait, kill, terminate."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        self._process = multiprocessing.get_context("fork").Process(
            target=_begin, args=(list(arguments), dict(environment), log)
        )
        # No signal may meet the parent's handlers in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _begin(arguments: list[str], environment: dict[str, str], log: Path | None) -> None:
    write_to(log)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing had opened another file for it
    for number in _RESET:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
    become(arguments, environment)
