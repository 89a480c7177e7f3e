"""Starts the ranks of a trainer on this machine and watches them: they live and die together.

A rank that dies leaves the others in the middle of a step that can never end. So its death ends all of them within
seconds, and the launcher with them, under the code of the rank that was the cause; whoever supervises the launcher
starts all anew. SIGTERM and SIGINT are passed on. Ranks notice by themselves when the launcher is killed.

Rank 0 writes where the launcher writes, every other rank to a log file of its own.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from rillflow.trainer.parallel.address import listen

log = logging.getLogger(__name__)

# The exit code of a rank that ended only because another had gone.
LEFT_ALONE = 75
# Exit codes of ranks that ended because of another one. Gloo's threads may abort a rank whose peer disappears.
_FOLLOWING = {LEFT_ALONE, -signal.SIGABRT}
_LOOK = 0.1
_LAST_WORDS = 3.0  # for ranks to notice that one has gone, and say so
_STOP_GRACE = 60.0  # for the last checkpoint; a supervisor with less patience kills the whole group
_TAIL = 15


class Process(Protocol):
    """What is asked of a started rank; `subprocess.Popen` has it."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int | None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


# Starts a process with this command and environment, which writes to the file, or where this process writes.
Start = Callable[[Sequence[str], Mapping[str, str], Path | None], Process]


def start_process(command: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> Process:
    with ExitStack() as stack:
        output = None if log_path is None else stack.enter_context(open(log_path, "ab"))
        return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def launch(
    command: Callable[[int, str], Sequence[str]],
    ranks: int,
    environment: Mapping[str, str],
    log_of: Callable[[int], Path],
    start: Start = start_process,
) -> int:
    """Run `command(rank, rendezvous)` for every rank until all have finished: 0, or the code that ended them."""
    with ExitStack() as stack:
        server = listen("127.0.0.1")
        rendezvous = "{}:{}".format(*server.getsockname()[:2])
        logs: dict[int, Path] = {rank: log_of(rank) for rank in range(1, ranks)}
        started: list[Process] = []
        stack.callback(_end, started)
        stopping = stack.enter_context(_passing_signals(started))
        for rank in range(ranks):
            started.append(start(command(rank, rendezvous), environment, logs.get(rank)))
        from rillflow.trainer.parallel.rendezvous import host_store  # loads torch, as the ranks are doing by now

        store = host_store(server)
        log.info("%d ranks meet at %s; logs of all but rank 0: %s", ranks, rendezvous, [str(p) for p in logs.values()])
        code = _watch(started, logs, stopping)
        del store
        return code


def _watch(started: Sequence[Process], logs: Mapping[int, Path], stopping: Callable[[], float | None]) -> int:
    """Until all have finished, one has died, or the time to stop is over."""
    while True:
        codes = [process.poll() for process in started]
        if all(code == 0 for code in codes):
            return 0
        since = stopping()
        if since is None and any(codes):
            return _cause(started, logs)
        if None not in codes:
            return next((code for code in codes if code and code != LEFT_ALONE), LEFT_ALONE)
        if since is not None and time.monotonic() - since > _STOP_GRACE:
            log.error("not all ranks have stopped within %.0f s: killed", _STOP_GRACE)
            return _code(-signal.SIGKILL)
        time.sleep(_LOOK)


def _cause(started: Sequence[Process], logs: Mapping[int, Path]) -> int:
    """Which rank took the others down, once they have had time for their last words."""
    deadline = time.monotonic() + _LAST_WORDS
    dead = [rank for rank, process in enumerate(started) if process.poll()]
    while time.monotonic() < deadline and any(process.poll() is None for process in started):
        time.sleep(_LOOK)
        dead += [rank for rank, process in enumerate(started) if process.poll() and rank not in dead]
    culprit = next(
        (rank for wrong in (_FOLLOWING, {LEFT_ALONE}) for rank in dead if started[rank].poll() not in wrong), dead[0]
    )
    code = started[culprit].poll() or 1
    log.error("rank %d ended with code %d: all end, to begin anew%s", culprit, code, _tail(logs.get(culprit)))
    return _code(code)


def _end(started: Sequence[Process]) -> None:
    """None is left behind."""
    for process in started:
        if process.poll() is None:
            process.kill()
    for process in started:
        process.wait(timeout=30.0)


def _code(code: int) -> int:
    """As a shell would say it: a process ended by a signal has 128 more than its number."""
    return 128 - code if code < 0 else code


def _tail(path: Path | None) -> str:
    if path is None:
        return ""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL:]
    return "".join(f"\n  | {line}" for line in (f"{path}:", *lines))


@contextmanager
def _passing_signals(started: Sequence[Process]) -> Iterator[Callable[[], float | None]]:
    """Yields since when the ranks were asked to stop."""
    asked: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        for process in started:
            if process.poll() is None:
                process.terminate()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
