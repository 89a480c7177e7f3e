"""Processes in which blocking libraries play, shared by all episodes of this process.

Invariants: a kind has at most `workers` processes with at most `games` games each; an episode waits for a free game
with a deadline, in the order of asking. A process that dies, breaks the protocol or misses a deadline is killed with
all its children: its episodes get EnvironmentLost, and the next one starts another. One that nobody plays in for
`idle` seconds is ended. A game whose episode went away in the middle of a call ends its process: nobody knows what it
is doing.
"""

from __future__ import annotations

import asyncio
import atexit
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rillflow.agents.environments.frames import read_frame, write_frame
from rillflow.engine.reaper import kill_group
from rillflow.errors import KINDS, EnvironmentLost

START_SECONDS = 60.0
IDLE_SECONDS = 120.0
_PROGRAM = "rillflow.agents.environments.worker"
_LOST = "the episode is played again; if it happens often, look at the environment's own log above"


class Worker:
    """One process. Calls are made one after the other, in a thread of its own."""

    def __init__(self, kind: str, games: int) -> None:
        self.kind = kind
        self.free = set(range(games))
        self.games = games
        self.dead = False
        self.idle_since = time.monotonic()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin, self._process.stdout
        self._thread = ThreadPoolExecutor(1, f"environment {kind}")
        self._started = False
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, question: Mapping[str, Any], seconds: float) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.call_here, question, seconds)

    def call_here(self, question: Mapping[str, Any], seconds: float) -> Any:
        """As `call`, for code that may block: what the game answers, or what it raised."""
        if not self._started:
            self._answer(START_SECONDS, "start")
            self._started = True
        try:
            write_frame(self._into.fileno(), question)
        except (OSError, ValueError) as error:
            raise self._lost("takes no more questions") from error
        return self._answer(seconds, str(question["do"]))

    def _answer(self, seconds: float, what: str) -> Any:
        try:
            answer = read_frame(self._out.fileno(), seconds)
        except TimeoutError as error:
            raise self._lost(f"did not {what} within {seconds:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            raise self._lost(f"has gone during {what}") from error
        if "ok" in answer:
            return answer["ok"]
        if what == "start":
            raise self._lost(f"could not start: {answer['error']}")
        raise KINDS.get(answer["kind"], EnvironmentLost)(answer["error"], answer["hint"])

    def _lost(self, how: str) -> EnvironmentLost:
        said = "" if self.dead else self._said()
        self.kill()
        return EnvironmentLost(f"the process of {self.kind} {how}{said}", _LOST)

    def _said(self) -> str:
        with suppress(OSError, ValueError):
            self._complaints.seek(max(0, self._complaints.seek(0, 2) - 400))
            said = self._complaints.read().decode(errors="replace").strip()
            return f"; it said: {said}" if said else ""
        return ""

    def kill(self) -> None:
        with self._ending:
            if self.dead:
                return
            self.dead = True
            kill_group(self._process.pid)
            self._process.wait()
        try:
            # A call in its thread sees the end of the pipe; the pipes are closed behind it, never under it.
            self._thread.submit(self._close)
            self._thread.shutdown(wait=False)
        except RuntimeError:  # this process ends, and its threads have
            self._close()

    def _close(self) -> None:
        for pipe in (self._into, self._out, self._complaints):
            with suppress(OSError):
                pipe.close()


class Seat:
    """A game that one episode has to itself until it is given back."""

    def __init__(self, pool: Pool, worker: Worker, number: int) -> None:
        self.worker = worker
        self._pool = pool
        self._number = number
        self._calling = False
        self._given_back = False

    async def call(self, do: str, seconds: float, **arguments: Any) -> Any:
        self._calling = True  # stays so where we are cancelled: the process still works on it
        try:
            answer = await self.worker.call({"do": do, "seat": self._number, **arguments}, seconds)
        except Exception:
            self._calling = False
            raise
        self._calling = False
        return answer

    def call_here(self, do: str, seconds: float, **arguments: Any) -> Any:
        return self.worker.call_here({"do": do, "seat": self._number, **arguments}, seconds)

    def give_back(self) -> None:
        if not self._given_back:
            self._given_back = True
            if self._calling:
                self.worker.kill()
            self._pool.put(self.worker, self._number)


class Pool:
    """All processes of one kind. Safe for threads; who waits, waits in its own event loop."""

    def __init__(self, kind: str, *, workers: int, games: int, idle: float = IDLE_SECONDS) -> None:
        self.kind, self.most, self.games, self.idle = kind, workers, games, idle
        self.workers: list[Worker] = []
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[Seat]]] = deque()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    async def take(self, seconds: float) -> Seat:
        """A free game; EnvironmentLost when none gets free in time."""
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
                future.result().give_back()  # it came in the moment in which we gave up
            raise
        if future.cancel():
            raise EnvironmentLost(
                f"no game of {self.kind} got free within {seconds:g} s: {self.most} processes of {self.games} play",
                "raise the environment's `workers` or `games`, or lower rollout.episodes",
            )
        return future.result()

    def take_here(self) -> Seat:
        """As `take`, for code that may block, of a pool in which nobody else plays."""
        with self._lock:
            seat = self._free()
        if seat is None:
            raise EnvironmentLost(f"all games of {self.kind} are taken", "make a pool of its own")
        return seat

    def _free(self) -> Seat | None:
        self.workers = [worker for worker in self.workers if not worker.dead]
        for worker in self.workers:
            if worker.free:
                return Seat(self, worker, worker.free.pop())
        if len(self.workers) >= self.most:
            return None
        self.workers.append(Worker(self.kind, self.games))
        return Seat(self, self.workers[-1], self.workers[-1].free.pop())

    def put(self, worker: Worker, number: int) -> None:
        with self._lock:
            worker.free.add(number)
            worker.idle_since = time.monotonic()
            while self._waiting and (seat := self._free()) is not None:
                loop, future = self._waiting.popleft()
                if future.cancelled() or loop.is_closed():
                    seat.worker.free.add(seat._number)
                    continue
                loop.call_soon_threadsafe(_hand_over, future, seat)
            self._expect_idle()

    def _expect_idle(self) -> None:
        if self._timer is None and any(len(worker.free) == worker.games for worker in self.workers):
            self._timer = threading.Timer(self.idle, self.end_idle)
            self._timer.daemon = True
            self._timer.start()

    def end_idle(self) -> None:
        """End the processes that nobody has played in for long."""
        with self._lock:
            self._timer = None
            now = time.monotonic()
            for worker in self.workers:
                if len(worker.free) == worker.games and now - worker.idle_since >= self.idle:
                    worker.kill()
            self.workers = [worker for worker in self.workers if not worker.dead]
            self._expect_idle()

    def close(self) -> None:
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


_pools: dict[tuple[str, int, int], Pool] = {}


def shared_pool(kind: str, workers: int, games: int) -> Pool:
    """The one of this process for that kind and size."""
    key = (kind, workers, games)
    if key not in _pools:
        _pools[key] = Pool(kind, workers=workers, games=games)
    return _pools[key]


def close_pools() -> None:
    """End all processes; the next episode starts new ones."""
    for pool in _pools.values():
        pool.close()


atexit.register(close_pools)
