"""A thread beside the one that talks to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")
_THREADS = 2
_MANY = 1 << 22  # bytes that are worth another thread


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: to start them for each call would take as long as what they do."""
    return ThreadPoolExecutor(_THREADS, "rillflow-delta")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of them


class Later(Generic[T]):
    """Work that another thread does if it is of many bytes, else the one that waits for it. It must not wait for other
    work of this kind."""

    def __init__(self, work: Callable[[], T], total: int) -> None:
        self._work = _pool().submit(work).result if total >= _MANY else work

    def wait(self) -> T:
        return self._work()
