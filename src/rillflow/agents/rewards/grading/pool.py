"""Processes that grade, one answer each at a time: what hangs is killed, and nobody else waits for it.

Invariants: a grade is what the grader said; a grader that hung, died or raised is a RewardError, never a grade. There
are at most `size` processes; they end when this process does.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import msgspec

from rillflow.agents.rewards.calling import in_thread
from rillflow.agents.rewards.grading.worker import LOAD, OUT_OF_TIME, Order, Reply
from rillflow.errors import RewardError
from rillflow.types.decoding import json_decoder

_START = 300.0  # seconds for a process to start and to load a grader
_LAST = 10.0  # seconds between the end of its output and its own
_WAIT = 120.0  # seconds for one to be free
_SLOWER = 4.0  # times the seconds of computing that may go by, where others compute as well


class GraderDied(Exception):
    """The process ended without an answer, for a reason of its own."""


class Grader:
    """One process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "rillflow.agents.rewards.grading.worker"]
        self._process = subprocess.Popen(  # a session of its own: an interrupt at the terminal is for us alone
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._loaded: set[str] = set()

    def grade(self, order: Order) -> Reply:
        """GraderDied when it ended by itself; RewardError when it took too long. Either way it is of no more use."""
        if order.name not in self._loaded:
            loaded = self._ask(Order(order.name, LOAD), _START)
            if loaded.error is not None:
                return loaded
            self._loaded.add(order.name)
        return self._ask(order, order.seconds * _SLOWER) if order.seconds else Reply(value=0.0)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of an order that it did not live to read
                if pipe is not None:
                    pipe.close()

    def _ask(self, order: Order, seconds: float) -> Reply:
        assert self._process.stdin is not None
        end = time.monotonic() + seconds
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise GraderDied from None
        line = self._line(end)
        if line is None:
            raise _too_slow(order)
        if not line.endswith(b"\n"):
            raise _too_slow(order) if self._ended() == -OUT_OF_TIME else GraderDied
        return json_decoder(Reply).decode(line)

    def _ended(self) -> int | None:
        """By what it ended, now that its output has."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_LAST)
        return None

    def _line(self, end: float) -> bytes | None:
        """What it writes up to the end of a line, or of all; None when that took too long."""
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), b""
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return None
            read = os.read(pipe, 1 << 16)
            if not read:
                break
            line += read
        return line


def _too_slow(order: Order) -> RewardError:
    return RewardError(
        f"grading by {order.name} took longer than {order.seconds:g} s", "raise the reward's `seconds` in the recipe"
    )


class GraderPool:
    """Graders by the need, at most `size`; `grade` may be called from any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = threading.BoundedSemaphore(size)
        self._idle: list[Grader] = []

    def grade(self, order: Order, given_up: threading.Event | None = None) -> float:
        """The grade, or RewardError. A grader that died is replaced and asked again, once. Where `given_up` is set
        before one is free, none is asked."""
        for _ in range(2):
            try:
                with self._grader(given_up) as grader:
                    reply = grader.grade(order)
            except GraderDied:
                continue
            if reply.value is None:
                raise RewardError(f"grading by {order.name}: {reply.error}")
            return reply.value
        raise RewardError(
            f"grading by {order.name}: its process died twice", "it may need more memory than it may have"
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _grader(self, given_up: threading.Event | None) -> Iterator[Grader]:
        if not self._free.acquire(timeout=_WAIT):
            raise RewardError(f"no grader was free within {_WAIT:.0f} s", "lower `rollout.episodes`")
        try:
            if given_up is not None and given_up.is_set():
                raise RewardError("nobody waits for the grade any more")
            grader = self._any()
            try:
                yield grader
            except BaseException:
                grader.close()
                raise
            self._idle.append(grader)
        finally:
            self._free.release()

    def _any(self) -> Grader:
        with suppress(IndexError):  # others pop, too
            return self._idle.pop()
        return Grader()


@cache
def shared_pool() -> GraderPool:
    """The pool of this process; a deadline is for each answer, so two processes are enough for hundreds a second."""
    pool = GraderPool(max(2, min(8, (os.cpu_count() or 2) // 2)))
    atexit.register(pool.close)
    return pool


async def prepare(name: str) -> None:
    """Start graders and let them load what they need, which takes longer than any answer may."""
    pool = shared_pool()
    await asyncio.gather(*(in_thread(pool.grade, Order(name, LOAD)) for _ in range(pool.size)))


async def grade(name: str, seconds: float, **arguments: Any) -> float:
    """The grade by the grader of this name (`worker.GRADERS`), or RewardError."""
    given_up = threading.Event()
    try:
        value: float = await in_thread(shared_pool().grade, Order(name, seconds, arguments), given_up)
        return value
    finally:
        given_up.set()  # a thread that still waits for a grader does not keep others from it
