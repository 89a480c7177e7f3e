"""Worker processes for code that blocks, hangs or crashes: text games and graders.

Invariants: a pool has at most `workers` processes with at most `seats` users each. A user takes a free seat in the
order of asking, with a deadline. A process that dies, breaks the protocol or misses a deadline is killed with all its
children; its users get WorkerLost, and the next user starts another process. A user that goes away during a call ends
the process too, because the state in which the call left it is unknown. Processes that are idle for `idle` seconds are
ended; all end with this process.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from rillflow.agents.sandbox.inside.values import receive, send
from rillflow.agents.worker import LARGEST
from rillflow.engine.reaper import kill_group
from rillflow.errors import KINDS
from rillflow.wire import in_daemon

IDLE_SECONDS = 120.0
_PROGRAM = "rillflow.agents.worker"
_MOST_OUTPUT = 1 << 20  # bytes of output that are kept; then the file begins again
_SHOWN = 400  # bytes of output in a message


class WorkerFailed(Exception):
    """The handler raised an exception. The process still works."""


class WorkerLost(Exception):
    """The process is gone: it died with the exit code `code`, or it was killed because it was `late`."""

    def __init__(self, message: str, *, late: bool = False, code: int | None = None) -> None:
        super().__init__(message)
        self.late, self.code = late, code


class Worker:
    """One process with `seats` users. It answers one question at a time."""

    def __init__(self, what: str, command: Sequence[str], *, seats: int, start_seconds: float) -> None:
        self.free = set(range(seats))
        self.dead = False
        self.idle_since = time.monotonic()
        self.known: set[str] = set()  # names of what the process has loaded, for its users
        self._what, self._seats, self._start_seconds = what, seats, start_seconds
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open as long as the process runs)
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # so that it can be truncated between two writes
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # in its own session: an interrupt at the terminal is not for it
                [sys.executable, "-m", _PROGRAM, *command],
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
        self._started = False
        self._turn = threading.Lock()  # held during a call
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """True if all seats are free."""
        return len(self.free) == self._seats

    async def call(self, question: Mapping[str, Any], seconds: float) -> Any:
        """Return the handler's answer; the seconds count from the moment at which the question is sent."""

        def exited(error: BaseException) -> Exception:
            return WorkerLost(f"the call was interrupted by {type(error).__name__}")

        return await in_daemon(partial(self.call_here, question, seconds), self._what, exited=exited)

    def call_here(self, question: Mapping[str, Any], seconds: float) -> Any:
        """As `call`, for code that may block."""
        try:
            with self._turn:
                if self.dead:
                    raise WorkerLost(f"{self._what} was ended")
                if not self._started:
                    self._receive(self._start_seconds, "start")
                    self._started = True
                self._send(question, seconds)
                answer = self._receive(seconds, "answer")
                if os.fstat(self._output.fileno()).st_size > _MOST_OUTPUT:
                    os.ftruncate(self._output.fileno(), 0)
                return answer
        finally:
            if self.dead:
                self._close()

    def _send(self, question: Mapping[str, Any], seconds: float) -> None:
        try:
            body = msgspec.json.encode(question)
        except (TypeError, ValueError) as error:
            raise WorkerFailed(f"the question cannot be sent: {error}") from None
        if len(body) > LARGEST:
            raise WorkerFailed(f"a question of {len(body)} bytes is longer than {LARGEST}")
        self._channel.settimeout(seconds)
        try:
            send(self._channel, body)
        except TimeoutError:
            raise self._lost(f"took no question within {seconds:g} s", late=True) from None
        except OSError:
            raise self._lost("died") from None

    def _receive(self, seconds: float, what: str) -> Any:
        try:
            answer = msgspec.json.decode(receive(self._channel, LARGEST, time.monotonic() + seconds))
        except TimeoutError:
            raise self._lost(f"did not {what} within {seconds:g} s", late=True) from None
        except (EOFError, OSError):
            raise self._lost(f"died before it could {what}") from None
        except msgspec.MsgspecError as error:
            raise self._lost(f"broke the protocol: {error}") from None
        if "ok" in answer:
            return answer["ok"]
        if what == "start":
            raise self._lost(f"could not start: {answer['error']}")
        if answer["kind"] in KINDS:
            raise KINDS[answer["kind"]](answer["error"], answer["hint"])
        raise WorkerFailed(answer["error"])

    def _lost(self, how: str, *, late: bool = False) -> WorkerLost:
        code = None if late else self._exit_code()
        written = "" if self.dead else self._last_words()
        self.kill()
        return WorkerLost(f"{self._what} {how}{written}", late=late, code=code)

    def _exit_code(self) -> int | None:
        """Return how the process ended; its socket closes a moment before it does."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(10.0)
        return None

    def _last_words(self) -> str:
        with suppress(OSError, ValueError):
            self._output.seek(max(0, self._output.seek(0, 2) - _SHOWN))
            text = self._output.read().decode(errors="replace").strip()
            return f"; its last output: {text}" if text else ""
        return ""

    def kill(self) -> None:
        """Kill the process with all its children. A call that is under way fails."""
        with self._ending:
            if self.dead:
                return
            self.dead = True
            kill_group(self._process.pid)
            self._process.wait()
        self._close()

    def _close(self) -> None:
        """Close our files, unless a call still uses them: then the call closes them when it ends."""
        if self._turn.acquire(blocking=False):
            try:
                self._channel.close()
                self._output.close()
            finally:
                self._turn.release()


class Seat:
    """The right of one user to call a process, until it is given back."""

    def __init__(self, pool: Pool, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number
        self._pool = pool
        self._calling = False
        self._given_back = False

    async def call(self, question: Mapping[str, Any], seconds: float) -> Any:
        """Return the answer to a question, which also carries the seat's number."""
        self._calling = True  # and stays so if we are cancelled: the process still works on the question
        try:
            answer = await self.worker.call({"seat": self.number, **question}, seconds)
        except Exception:
            self._calling = False
            raise
        self._calling = False
        return answer

    def call_here(self, question: Mapping[str, Any], seconds: float) -> Any:
        """As `call`, for code that may block."""
        return self.worker.call_here({"seat": self.number, **question}, seconds)

    def give_back(self) -> None:
        """Let another user have the seat."""
        if not self._given_back:
            self._given_back = True
            if self._calling:
                self.worker.kill()
            self._pool.put(self.worker, self.number)


class Pool:
    """The processes of one command, named `what` in messages. Safe for threads and for several event loops."""

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        *,
        workers: int,
        seats: int = 1,
        idle: float | None = IDLE_SECONDS,
        start_seconds: float = 60.0,
    ) -> None:
        self.what, self.size, self.seats = what, workers, seats
        self.workers: list[Worker] = []
        self._command, self._idle, self._start_seconds = tuple(command), idle, start_seconds
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[Seat]]] = deque()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        _POOLS.add(self)

    async def take(self, seconds: float) -> Seat:
        """Return a free seat, or raise TimeoutError if none becomes free in time."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if (seat := self._free()) is not None:
                return seat
            future: asyncio.Future[Seat] = loop.create_future()
            self._waiting.append((loop, future))
        try:
            await asyncio.wait([future], timeout=seconds)
        except asyncio.CancelledError:
            if not future.cancel():
                future.result().give_back()  # it came at the moment of the cancellation
            raise
        if future.cancel():
            raise TimeoutError(f"no free seat in {self.what} within {seconds:g} s")
        return future.result()

    def take_here(self) -> Seat:
        """Return a free seat of a pool with no other user, for code that may block."""
        with self._lock:
            seat = self._free()
        if seat is None:
            raise TimeoutError(f"all seats of {self.what} are taken")
        return seat

    def _free(self) -> Seat | None:
        self.workers = [worker for worker in self.workers if not worker.dead]
        for worker in self.workers:
            if worker.free:
                return Seat(self, worker, worker.free.pop())
        if len(self.workers) >= self.size:
            return None
        worker = Worker(self.what, self._command, seats=self.seats, start_seconds=self._start_seconds)
        self.workers.append(worker)
        return Seat(self, worker, worker.free.pop())

    def put(self, worker: Worker, number: int) -> None:
        """Take back a seat and hand it to the first that waits."""
        with self._lock:
            worker.free.add(number)
            worker.idle_since = time.monotonic()
            while self._waiting and (seat := self._free()) is not None:
                loop, future = self._waiting.popleft()
                if future.cancelled() or loop.is_closed():
                    seat.worker.free.add(seat.number)
                    continue
                loop.call_soon_threadsafe(_hand_over, future, seat)
            self._expect_idle()

    def _expect_idle(self) -> None:
        if self._idle is not None and self._timer is None and any(worker.idle for worker in self.workers):
            self._timer = threading.Timer(self._idle, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

    def _end_idle(self) -> None:
        with self._lock:
            self._timer = None
            latest = time.monotonic() - (self._idle or 0.0)
            for worker in self.workers:
                if worker.idle and worker.idle_since <= latest:
                    worker.kill()
            self.workers = [worker for worker in self.workers if not worker.dead]
            self._expect_idle()

    def close(self) -> None:
        """End all processes; the next user starts new ones."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for worker in self.workers:
                worker.kill()
            self.workers = []


def _hand_over(future: asyncio.Future[Seat], seat: Seat) -> None:
    if future.done():
        seat.give_back()
    else:
        future.set_result(seat)


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def close_pools() -> None:
    """End the processes of all pools."""
    for pool in list(_POOLS):
        pool.close()


atexit.register(close_pools)
