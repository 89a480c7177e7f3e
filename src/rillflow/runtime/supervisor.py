"""Keeps the processes of a run alive. A process that dies is started again, a bounded number of times.

Deaths are counted in a row: the count restarts once a process has lived for `SETTLED` seconds while the run progressed.
So a run of weeks survives occasional crashes, while a run without progress, or a process that cannot stay up, ends it.

Invariants: every process runs in its own process group, which dies with it. `stop` leaves no process behind and takes
at most `grace` + 1 seconds. A process that ended with code 0, gave up, was released (`let_go`) or was stopped alone
(`stop_one`) is not started again.

`OnDemand` is a port whose process is started by the first connection to it, so that it costs nothing until then. The
connections of the meantime wait in the socket's queue: the process takes the socket over and serves them. It is for
what a run can do without: that the port cannot be opened is reported, and nothing else comes of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rillflow.errors import RunError
from rillflow.runtime.preloaded import Forked, Preloaded
from rillflow.runtime.process import GIVE_UP, child_environment
from rillflow.storage.startup import NOT_BEGUN

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_LOG_TAIL = 25
_KILL_WAIT = 1.0
SETTLED = 300.0


@dataclass(frozen=True)
class ProcessSpec:
    """One process: its name in logs and endpoints, and the `rillflow` arguments that start it."""

    name: str
    arguments: tuple[str, ...]
    heavy: bool = False  # it imports torch, which the fork server has done already
    handles: tuple[int, ...] = ()  # file descriptors that it takes over


class Supervised:
    """One process and its restarts."""

    def __init__(
        self, spec: ProcessSpec, log_path: Path, restarts: int, threads: int, preloaded: Preloaded | None = None
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self.starts = 0
        self.began = 0.0  # when it was started last, in seconds since the epoch
        self.keep_alive = True
        self._deaths = 0
        self._since = 0.0
        self._restarts = restarts
        self._threads = threads
        self._preloaded = preloaded if spec.heavy else None
        self._process: asyncio.subprocess.Process | Forked | None = None

    @property
    def first_stage(self) -> str:
        """The first stage of its start: the imports of the fork server, or its own."""
        return NOT_BEGUN if self._preloaded is None else "importing torch"

    @property
    def pid(self) -> int | None:
        """The pid of the running process; None between two starts."""
        return self._process.pid if self._process is not None and not _has_ended(self._process) else None

    async def run(self) -> None:
        """Run until the process finishes (code 0). Raises RunError if it gave up, or died too often."""
        while self._wanted() and (code := await self._run_once()) != 0 and self._wanted():
            self._deaths += 1
            if code == GIVE_UP or self._deaths > self._restarts:
                often = "" if code == GIVE_UP else f" for the {self._deaths}. time"
                raise RunError(
                    f"{self.spec.name} {_how(code)}{often}\n{self._tail()}",
                    f"the whole log is {self.log_path}",
                )
            log.warning("%s %s: starting it again", self.spec.name, _how(code))
            await asyncio.sleep(min(_FIRST_PAUSE * 2 ** (self._deaths - 1), _LONGEST_PAUSE))

    def _wanted(self) -> bool:
        return self.keep_alive

    def settle(self) -> None:
        """Reset the count of deaths after progress of the run, if the process has lived long enough."""
        if self.pid is not None and time.monotonic() - self._since >= SETTLED:
            self._deaths = 0

    async def _run_once(self) -> int | None:
        self.starts += 1
        self._since = time.monotonic()
        self.began = time.time()
        self._process = await self._start_process()
        code = await self._process.wait()
        self.signal(signal.SIGKILL)  # its remaining children
        return code

    async def _start_process(self) -> asyncio.subprocess.Process | Forked:
        environment = child_environment(self._threads)
        if self._preloaded is not None:
            forked = await self._preloaded.start(self.spec.arguments, environment, self.log_path)
            if forked is not None:
                return forked
        with open(self.log_path, "ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rillflow",
                *self.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                pass_fds=self.spec.handles,
            )

    def signal(self, number: signal.Signals) -> None:
        """Signal the process group, so that children of the process get the signal too."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def wait(self, seconds: float) -> bool:
        """Return whether it has ended within `seconds`."""
        if self._process is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return _has_ended(self._process)

    def _tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return "\n".join(f"  | {line}" for line in lines)


def _has_ended(process: asyncio.subprocess.Process | Forked) -> bool:
    return process.returncode is not None or (isinstance(process, Forked) and process.lost)


def _how(code: int | None) -> str:
    return "was lost with the fork server" if code is None else f"ended with code {code}"


class Supervisor:
    """All processes of a run on this machine."""

    def __init__(
        self, logs: Path, restarts: int, threads: int, grace: float = 3.0, preloaded: Preloaded | None = None
    ) -> None:
        self._logs = logs
        self._preloaded = preloaded
        self._restarts = restarts
        self._threads = threads
        self._grace = grace
        self._running: dict[Supervised, asyncio.Task[None]] = {}

    def start(self, spec: ProcessSpec) -> Supervised:
        path = self._logs / f"{spec.name}.log"
        return self.add(Supervised(spec, path, self._restarts, self._threads, self._preloaded))

    def add(self, process: Supervised) -> Supervised:
        self._running[process] = asyncio.create_task(process.run(), name=process.spec.name)
        return process

    @property
    def processes(self) -> Sequence[Supervised]:
        return list(self._running)

    def check(self) -> None:
        """Raise the error of the first process that cannot be kept alive."""
        for error in self.failures().values():
            raise error

    def failures(self) -> dict[str, BaseException]:
        """Return the processes that cannot be kept alive, each with its error."""
        return {
            process.spec.name: error
            for process, task in self._running.items()
            if task.done() and not task.cancelled() and (error := task.exception()) is not None
        }

    def finished(self) -> set[str]:
        """Return the processes that have ended with code 0."""
        return {
            process.spec.name
            for process, task in self._running.items()
            if task.done() and not task.cancelled() and task.exception() is None
        }

    def forget(self, name: str) -> None:
        """Drop a process that cannot be kept alive, or that has finished."""
        for process, task in list(self._running.items()):
            if process.spec.name == name and task.done():
                del self._running[process]

    async def wait(self, seconds: float) -> bool:
        """Return whether every process has finished within `seconds`."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=seconds)
        return all(task.done() for task in self._running.values())

    def progressed(self) -> None:
        """Note that the run has progressed."""
        for process in self._running:
            process.settle()

    def kill(self, name: str) -> None:
        """End a process that hangs; it is started again like any that died."""
        for process in self._running:
            if process.spec.name == name and process.pid is not None:
                process.signal(signal.SIGKILL)

    async def let_go(self, name: str, seconds: float) -> bool:
        """Let a process end and never start it again; return whether it has ended within `seconds`."""
        tasks = []
        for process, task in self._running.items():
            if process.spec.name == name:
                process.keep_alive = False
                tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self.forget(name)
        return all(task.done() for task in tasks)

    async def stop_one(self, name: str, grace: float) -> None:
        """Ask a process to stop, and end it if it has not within `grace` seconds; it is never started again."""
        for process, task in list(self._running.items()):
            if process.spec.name != name:
                continue
            process.keep_alive = False
            if process.pid is None:
                task.cancel()  # it waits for its next life; the id of the last one may belong to others by now
            else:
                process.signal(signal.SIGTERM)
            await asyncio.wait({task}, timeout=grace)
            if not task.done():
                log.warning("%s did not stop within %.0f s: killed", name, grace)
                process.signal(signal.SIGKILL)
                await asyncio.wait({task}, timeout=_KILL_WAIT)
            self._running.pop(process, None)

    async def finish(self, seconds: float, keep: Collection[str]) -> None:
        """Let all processes but those in `keep` end, within `seconds`; none is started again."""
        others = {process: task for process, task in self._running.items() if process.spec.name not in keep}
        for process in others:
            process.keep_alive = False
        if others:
            await asyncio.wait(others.values(), timeout=seconds)

    async def stop(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        # Those that have ended are left out: their ids may belong to others by now.
        alive = [process for process in self._running if process.pid is not None]
        for process in alive:
            process.signal(signal.SIGTERM)
        ended = await asyncio.gather(*(process.wait(self._grace) for process in alive))
        for process, gone in zip(alive, ended, strict=True):
            if not gone:
                log.warning("%s did not stop within %.0f s: killed", process.spec.name, self._grace)
            # Even if the leader has ended: members of its group may still run.
            process.signal(signal.SIGKILL)
        await asyncio.gather(*(process.wait(_KILL_WAIT) for process in alive))
        if self._preloaded is not None:
            await self._preloaded.close()
        self._running.clear()


# ---------------------------------------------------------------- a port on demand


_WAITING = 64  # connections


class OnDemand:
    """Listens on loopback; `start` is called once, with the socket's file descriptor, at the first connection."""

    def __init__(self, start: Callable[[int], None], port: int = 0) -> None:
        """The port that it had before is only a wish. OSError where nothing can be opened."""
        self._start = start
        try:
            self._listener = _listen(port)
        except OSError:
            self._listener = _listen(0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._knock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _knock(self) -> None:
        self._loop.remove_reader(self._listener)
        self._start(self._listener.fileno())

    def close(self) -> None:
        """Refuse further connections, unless the started process has taken the socket over."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_WAITING)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
