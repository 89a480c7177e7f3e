"""Forking a process that has imported torch, so that the new one does not import it again.

Invariants: only a process with one thread and without a CUDA context forks. A forked process keeps no file of its
parent but its log, begins with the default signals, and never returns into its parent's code.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import setproctitle

from rillflow.trainer.parallel.launch import Process, Start, start_process

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def unsafe() -> str | None:
    """Return why this process must not fork, or None. Children of a process with threads inherit their locks."""
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) != 1:
        names = ", ".join((thread / "comm").read_text().strip() for thread in threads)
        return f"it has {len(threads)} threads ({names})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has a CUDA context"
    return None


# Before a fork, a look for GPUs must not make a CUDA context, and neither numpy's BLAS nor the allocator of pyarrow,
# which transformers imports where it is installed, may start a thread.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def start_ranks(modules: Sequence[str]) -> Start:
    """Return a function that starts the ranks of a trainer with the arguments of `rillflow`: forked from this process,
    which imports `modules` once for all of them, or as new processes if it must not fork."""
    if sys.platform == "linux":
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for module in modules:
            importlib.import_module(module)
    return _start_rank


def _start_rank(arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> Process:
    rank = arguments[arguments.index("--rank") + 1]
    reason = unsafe() if sys.platform == "linux" else "only Linux forks"
    if reason is None:
        log.info("forking rank %s", rank)
        return ForkedChild(arguments, environment, log_path)
    log.info("starting rank %s, which imports for itself: this process must not fork, %s", rank, reason)
    return start_process([sys.executable, "-m", "rillflow", *arguments], environment, log_path)


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


def write_to(log_path: Path | None) -> None:
    """Let standard output and error go to a file, or stay; nothing can be read from standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log_path is not None:
        output = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)


class ForkedChild:
    """A child of this process that runs `rillflow ARGUMENTS`; as of `subprocess.Popen`: poll, wait, kill, terminate."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> None:
        self._process = multiprocessing.get_context("fork").Process(
            target=_begin, args=(list(arguments), dict(environment), log_path)
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


def _begin(arguments: list[str], environment: dict[str, str], log_path: Path | None) -> None:
    write_to(log_path)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing had opened another file for it
    for number in _RESET:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
    become(arguments, environment)
