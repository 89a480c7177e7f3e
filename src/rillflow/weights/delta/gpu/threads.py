"""Threads that copy and hash bytes, beside the one that talks to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np

from rillflow.weights.delta.gpu.batch import Array

_THREADS = 3
# So many bytes and more are worth several threads.
_MANY = 1 << 22


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: to start them for each call would take as long as what they do."""
    return ThreadPoolExecutor(_THREADS, "rillflow-delta")


# A fork has none of them.
os.register_at_fork(after_in_child=_pool.cache_clear)


def divided(work: Callable[[int, int], None], total: int) -> list[Future[None]]:
    """`work(first, beyond)` of so many bytes: few here and now, many by other threads, all of which get as many."""
    if total < _MANY:
        work(0, total)
        return []
    return [_pool().submit(work, *share) for share in pairwise(total * n // _THREADS for n in range(_THREADS + 1))]


def shared(work: Callable[[int, int], None], to: Array) -> list[Future[None]]:
    """`work(first, beyond)` of all items, whose bytes begin at `to` and end at its last: few here and now, many by
    other threads, each a share of them. `work` should be one call that needs no lock of the interpreter."""
    total, number = int(to[-1]), len(to) - 1
    if total < _MANY:
        work(0, number)
        return []
    shares = np.arange(1, _THREADS) * total // _THREADS
    bounds = [0, *np.searchsorted(to[:-1], shares).tolist(), number]
    return [_pool().submit(work, *share) for share in pairwise(bounds)]
