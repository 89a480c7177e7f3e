"""Ranks as threads of one process: real gloo groups on loopback, without the time that processes take to start.

Good for everything but models that are sharded, whose groups are a whole process's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from rillflow.trainer.parallel.distributed import Distributed

T = TypeVar("T")


def as_peers(ranks: int, work: Callable[[Distributed], T], *, seconds: float = 20.0) -> list[T]:
    """What `work` gives on each rank. The first error of a rank is raised once all have ended."""
    store = HashStore()

    def run(rank: int) -> T:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=seconds)
        return work(Distributed(rank, ranks, ProcessGroupGloo(store, rank, ranks, options)))

    with ThreadPoolExecutor(ranks) as pool:
        running = [pool.submit(run, rank) for rank in range(ranks)]
    return [future.result() for future in running]
