"""Starts the ranks of a trainer on this machine and watches them. Without torch: ranks are started before it is loaded.

A rank that dies leaves the others in a step that can never end. So its death ends all ranks within seconds, and the
launcher with the exit code of the rank that caused it; a supervisor then restarts the launcher. SIGTERM and SIGINT are
passed on. Ranks notice when the launcher is killed.

Rank 0 writes to the launcher's output, every other rank to its own log file.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from rillflow.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A rank, the number of ranks, and the address (HOST:PORT) where they meet. The default is a trainer of one
    rank."""

    rank: int = 0
    ranks: int = 1
    rendezvous: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank {self.rank} of {self.ranks} does not exist", "ranks are counted from 0")


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening socket for `host_store`, by default at a free port. Early connections wait in its queue."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(4096)
    except OSError as error:
        server.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}", "rank 0 must run on the host that --rendezvous names"
        ) from error
    return server


def parse(rendezvous: str) -> tuple[str, int]:
    host, colon, port = rendezvous.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"{rendezvous!r} is not HOST:PORT", "for example --rendezvous 127.0.0.1:29400")
    return host.strip("[]"), int(port)


# ---------------------------------------------------------------- the launcher


# The exit code of a rank that ended only because another rank was lost.
LEFT_ALONE = 75
# Exit codes of ranks that ended because of another rank. Gloo's threads may abort a rank whose peer disappears.
_FOLLOWING = {LEFT_ALONE, -signal.SIGABRT}
_POLL = 0.1
_LAST_WORDS = 3.0  # seconds for ranks to notice a lost rank and log it
_STOP_GRACE = 60.0  # seconds for the last checkpoint; a supervisor with less patience kills the whole group
_TAIL = 15


class Process(Protocol):
    """The methods of `subprocess.Popen` that the launcher uses."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int | None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


# Starts a process with a command and an environment; it writes to the file, or by default to this process's output.
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
    """Run `command(rank, rendezvous)` for every rank until all have finished; return 0, or the code that ended them."""
    with ExitStack() as stack:
        server = listen("127.0.0.1")
        rendezvous = "{}:{}".format(*server.getsockname()[:2])
        logs: dict[int, Path] = {rank: log_of(rank) for rank in range(1, ranks)}
        started: list[Process] = []
        stack.callback(_end, started)
        stopping = stack.enter_context(_passing_signals(started))
        for rank in range(ranks):
            started.append(start(command(rank, rendezvous), environment, logs.get(rank)))
        from rillflow.trainer.parallel.distributed import host_store  # imports torch, as the ranks do meanwhile

        store = host_store(server)
        log.info("%d ranks meet at %s; logs of all but rank 0: %s", ranks, rendezvous, [str(p) for p in logs.values()])
        code = _watch(started, logs, stopping)
        del store
        return code


def _watch(started: Sequence[Process], logs: Mapping[int, Path], stopping: Callable[[], float | None]) -> int:
    """Wait until all ranks have finished, one has died, or the time to stop is over; return the exit code."""
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
            log.error("killing ranks that have not stopped within %.0f s", _STOP_GRACE)
            return _code(-signal.SIGKILL)
        time.sleep(_POLL)


def _cause(started: Sequence[Process], logs: Mapping[int, Path]) -> int:
    """Return the exit code of the rank that caused the end, after the others had time to log."""
    deadline = time.monotonic() + _LAST_WORDS
    dead = [rank for rank, process in enumerate(started) if process.poll()]
    while time.monotonic() < deadline and any(process.poll() is None for process in started):
        time.sleep(_POLL)
        dead += [rank for rank, process in enumerate(started) if process.poll() and rank not in dead]
    culprit = next(
        (rank for wrong in (_FOLLOWING, {LEFT_ALONE}) for rank in dead if started[rank].poll() not in wrong), dead[0]
    )
    code = started[culprit].poll() or 1
    log.error("rank %d ended with code %d: all ranks end and are restarted%s", culprit, code, _tail(logs.get(culprit)))
    return _code(code)


def _end(started: Sequence[Process]) -> None:
    """Kill the ranks that still run."""
    for process in started:
        if process.poll() is None:
            process.kill()
    for process in started:
        process.wait(timeout=30.0)


def _code(code: int) -> int:
    """Return the code as a shell does: 128 plus the number of a signal."""
    return 128 - code if code < 0 else code


def _tail(path: Path | None) -> str:
    if path is None:
        return ""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL:]
    return "".join(f"\n  | {line}" for line in (f"{path}:", *lines))


@contextmanager
def _passing_signals(started: Sequence[Process]) -> Iterator[Callable[[], float | None]]:
    """Pass signals on to the ranks; yield a function that returns when they were asked to stop."""
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
