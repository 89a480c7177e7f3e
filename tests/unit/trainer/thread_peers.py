"""Ranks as threads of one process: their messages go through a list, in lockstep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rillflow.errors import LeaseLost

T = TypeVar("T")


class ThreadPeers:
    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(said)
        self._said = said
        self._barrier = barrier

    def _meet(self, value: T) -> list[T]:
        self._said[self.rank] = value
        self._barrier.wait()
        heard = list(self._said)
        self._barrier.wait()
        return heard

    def first(self, message: bytes) -> bytes:
        return self._meet(message)[0]

    def everyone(self, message: bytes) -> list[bytes]:
        return self._meet(message)

    def total(self, values: Sequence[float]) -> list[float]:
        return [sum(each) for each in zip(*self._meet(values), strict=True)]

    def highest(self, values: Sequence[float]) -> list[float]:
        return [max(each) for each in zip(*self._meet(values), strict=True)]

    def exchange(self, messages: Sequence[bytes | memoryview]) -> list[bytes]:
        return [bytes(theirs[self.rank]) for theirs in self._meet(messages)]

    def add(self, tensors: Sequence[Any]) -> None:
        heard = self._meet([tensor.clone() for tensor in tensors])
        for place, tensor in enumerate(tensors):
            tensor.copy_(sum(theirs[place] for theirs in heard))

    def agree(self, error: Exception | None) -> None:
        heard = self._meet(error)
        if error is not None:
            raise error
        if any(heard):
            raise LeaseLost("another rank has failed")


def in_ranks(size: int, work: Callable[[ThreadPeers], T]) -> list[T]:
    """Return the result of each rank's `work`, or raise the first error."""
    said: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=120)

    def run(rank: int) -> T:
        try:
            return work(ThreadPeers(rank, said, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for done in runs if (error := done.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [done.result() for done in runs]
