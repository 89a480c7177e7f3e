"""Threads that copy and hash bytes, beside the one that talks to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from rillflow.weights.delta.gpu.batch import Array

T = TypeVar("T")
# Threads that copy and hash, and threads that may wait for these and for the device.
_THREADS, _WAITING = 4, 2
# So many bytes are worth another thread.
_MANY = 1 << 22


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: to start them for each call would take as long as what they do. They wait for nothing."""
    return ThreadPoolExecutor(_THREADS, "rillflow-delta")


@cache
def _waiting() -> ThreadPoolExecutor:
    """Threads that may wait for the others: if these waited for one another, all might be waiting."""
    return ThreadPoolExecutor(_WAITING, "rillflow-delta-waiting")


# A fork has none of them.
os.register_at_fork(after_in_child=_pool.cache_clear)
os.register_at_fork(after_in_child=_waiting.cache_clear)


def _shares(total: int) -> int:
    """As many as are worth it: a thread that wakes up takes its time, too."""
    return max(1, min(total // max(_MANY, 1), _THREADS))


def divided(work: Callable[[int, int], None], total: int) -> list[Future[None]]:
    """`work(first, beyond)` of so many bytes: few here and now, many by other threads, all of which get as many."""
    if total < _MANY:
        work(0, total)
        return []
    shares = _shares(total)
    return [_pool().submit(work, *share) for share in pairwise(total * n // shares for n in range(shares + 1))]


class Later(Generic[T]):
    """Work that another thread does if it is of many bytes, else the one that waits for it. It may wait for the device
    and for shares of work, but not for other work of this kind."""

    def __init__(self, work: Callable[[], T], total: int) -> None:
        self._work = _waiting().submit(work).result if total >= _MANY else work

    def wait(self) -> T:
        return self._work()


def shared(work: Callable[[int, int], None], to: Array) -> list[Future[None]]:
    """`work(first, beyond)` of all items, whose bytes begin at `to` and end at its last: few here and now, many by
    other threads, each a share of them. `work` should be one call that needs no lock of the interpreter."""
    total, number = int(to[-1]), len(to) - 1
    if total < _MANY:
        work(0, number)
        return []
    shares = _shares(total)
    bounds = [0, *np.searchsorted(to[:-1], np.arange(1, shares) * total // shares).tolist(), number]
    return [_pool().submit(work, *share) for share in pairwise(bounds)]
