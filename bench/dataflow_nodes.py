"""What a lease costs in a ledger to which many nodes have come and gone, beside one to which none has.

Both ledgers are on disk and have three live nodes and the same tasks. The nodes that are gone were heard of once each
and then never again, as the ledger's own clock says, which is moved by hand. The two take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.rules import Rules
from rillflow.dataflow.sources import InOrder
from rillflow.types import CompleteTask, Heartbeat, LeaseTasks, Prompt, Row, SampleMeta, TaskLease, UnitBeat, UnitInfo

MAIN, UNIT, LIVE = "main", "u", ("n0", "n1", "n2")
NODE_TIMEOUT = 10.0


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def lease_seconds(gone: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a lease after `gone` nodes have come and gone, and where none has."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        both = [stack.enter_context(_Side(Path(folder) / f"{number}.sqlite", number)) for number in (gone, 0)]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for side, found in zip(both, times, strict=True):
                found.append(side.lease())
        return statistics.median(times[0]), statistics.median(times[1])


class _Side:
    """One ledger. The live nodes take turns; each plays what it has leased before the next one asks."""

    def __init__(self, path: Path, gone: int) -> None:
        rules = Rules.single(
            MAIN,
            seed=7,
            group_size=8,
            staleness=4,
            batch_groups=64,
            total_steps=100,
            attempts=3,
            task_lease=1e9,
            batch_lease=300.0,
            node_timeout=NODE_TIMEOUT,
            unit_timeout=1e9,
            max_failures=1000,
        )
        prompts = InOrder([Prompt(id=f"p{n}", payload={"n": n}) for n in range(1000)])
        self._clock, self._asks = Clock(), 0
        self._ledger = Ledger(path, rules, prompts, None, clock=self._clock)
        self._ledger.unit_beat(UnitBeat(info=UnitInfo(unit=UNIT, path="")))
        self._ledger.advance()
        for n in range(gone):
            self._beat(f"gone{n}")
        self._clock.time += 2 * NODE_TIMEOUT
        for node in LIVE:
            self._beat(node)
        self._ledger.expire()
        self._ledger.commit()

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()

    def _beat(self, node: str) -> None:
        beat = Heartbeat(node=node, incarnation="x", attempts=[], versions={MAIN: 0}, capacity=64)
        self._ledger.renew(beat)

    def lease(self) -> float:
        """Return the seconds of one lease; its episode is played, and all of it is durable, before the next."""
        self._asks += 1
        node = LIVE[self._asks % len(LIVE)]
        ask = LeaseTasks(node=node, incarnation="x", want=1, versions={MAIN: 0}, attempt=f"ask{self._asks}")
        begun = time.perf_counter()
        leases = self._ledger.lease_tasks(ask).leases
        seconds = time.perf_counter() - begun
        self._play(node, leases)
        return seconds

    def _play(self, node: str, leases: list[TaskLease]) -> None:
        (lease,) = leases
        row = Row(unit=UNIT, segment=0, offset=8 * self._asks, length=8)
        sample = SampleMeta(policy=MAIN, row=row, tokens=8, trained=4, oldest=0, newest=0, reward=1.0)
        news = CompleteTask(
            task=lease.task.id, attempt=lease.attempt, node=node, reward=1.0, samples=[sample], calls=1, seconds=1.0
        )
        self._ledger.complete(news)
        self._ledger.commit()
