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


# Gloo tells others the port before it listens there: another program of the machine may have it by then.
_TRIES = 3


def as_peers(ranks: int, work: Callable[[Distributed], T], *, seconds: float = 60.0) -> list[T]:
    """What `work` gives on each rank. The first error of a rank is raised once all have ended."""
    groups = _groups(ranks)
    for group in groups:
        group._set_default_timeout(timedelta(seconds=seconds))
    with ThreadPoolExecutor(ranks) as pool:
        running = [
            pool.submit(lambda rank: work(Distributed(rank, ranks, groups[rank])), rank) for rank in range(ranks)
        ]
    return [future.result() for future in running]


def _groups(ranks: int, tries: int = _TRIES) -> list[ProcessGroupGloo]:
    store = HashStore()

    def join(rank: int) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60.0)
        return ProcessGroupGloo(store, rank, ranks, options)

    with ThreadPoolExecutor(ranks) as pool:
        joining = [pool.submit(join, rank) for rank in range(ranks)]
    try:
        return [future.result() for future in joining]
    except RuntimeError as error:
        if tries == 1 or "connectFullMesh" not in str(error):
            raise
    return _groups(ranks, tries - 1)
