"""Wall time and core time of a piece of work that several processes share."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import psutil


class Moment(NamedTuple):
    """A moment: seconds on the wall clock, and core seconds that a process and all its descendants have used so far."""

    wall: float
    cores: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), _core_seconds())

    def passed(self, name: str, count: int = 1) -> dict[str, float]:
        """Return the seconds since this moment, for each of `count`, under `name` and `name cores`."""
        wall = time.perf_counter()
        return {name: (wall - self.wall) / count, f"{name} cores": (_core_seconds() - self.cores) / count}


def _core_seconds() -> float:
    """Processes that have ended count as far as their parents have waited for them."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # ended in this moment
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
