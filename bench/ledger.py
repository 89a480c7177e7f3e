"""What one sample costs the ledger itself: processor time of the calls that carry it from a prompt to a step.

    python -m bench.ledger [--quick] [--json FILE]

The ledger runs in this process, without HTTP and without the wait for the disk. Each sample is admitted, leased, named
in one heartbeat, completed, served in a batch and committed; the changes of some calls share one write to the log, as
they do in the service. Every number is the median over the steps of a run, in microseconds of processor time for each
sample, the writes included. `one` completes a task in each call, `many` sixteen. The clock is read once for each kind
of call in a step: reading it takes longer than some of the calls.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.common import Report, parser
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.rules import Rules
from rillflow.dataflow.sources import InOrder
from rillflow.types import (
    CommitBatch,
    CompleteTask,
    Heartbeat,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    Prompt,
    Row,
    SampleMeta,
    TaskLease,
    UnitBeat,
    UnitInfo,
)

MAIN, GROUP, BATCH, SLOTS = "main", 8, 64, 64
CALLS_A_WRITE = 8
_MEMORY = Path("/dev/shm")


class Run:
    """One trainer, some nodes and a storage unit, which all speak to one ledger."""

    def __init__(self, folder: Path, nodes: int, steps: int, at_once: int) -> None:
        self._nodes = nodes
        self._at_once = at_once
        self._calls = 0
        self._version = 0
        self._seconds: dict[str, float] = defaultdict(float)
        self.costs: dict[str, list[float]] = defaultdict(list)
        rules = Rules.single(
            MAIN, group_size=GROUP, staleness=8, batch_groups=BATCH, total_steps=10 * steps, node_timeout=1e9
        )
        source = InOrder([Prompt(id=f"p{n}", payload={}) for n in range(BATCH * (steps + 12))])
        self._ledger = Ledger(folder / "ledger.sqlite", rules, source, hooks=Hooks())
        self._ledger.unit_beat(UnitBeat(info=UnitInfo(unit="u", path="/u", load=0.0)))
        self._ledger.join_trainer(JoinTrainer(policy=MAIN, incarnation="t", checkpoint=0))
        self._ledger.advance()
        for node in range(nodes):
            self._beat(node, [])

    def close(self) -> None:
        self._ledger.close()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self._seconds[name] += time.process_time() - began

    def _write(self, *, now: bool = False) -> None:
        self._calls += 1
        if now or self._calls % CALLS_A_WRITE == 0:
            self._ledger.write()

    def step(self) -> None:
        """Play and train as many samples as a batch has."""
        samples = GROUP * BATCH
        with self._timed("lease"):
            leases = self._lease(samples)
        with self._timed("heartbeat"):
            for node, held in leases.items():
                self._beat(node, [lease.attempt for lease in held])
                self._write()
        news = [self._news(node, lease) for node, held in leases.items() for lease in held]
        with self._timed("complete"):
            for first in range(0, samples, self._at_once):
                answers = self._ledger.complete_many(news[first : first + self._at_once])
                assert all(getattr(answer, "accepted", False) for answer in answers), answers
                self._write()
        self._train()
        for name, seconds in self._seconds.items():
            self.costs[name].append(seconds / samples * 1e6)
        self._seconds.clear()

    def _lease(self, samples: int) -> dict[int, list[TaskLease]]:
        """Lease as many tasks, by node."""
        found: dict[int, list[TaskLease]] = {}
        left, node = samples, 0
        while left:
            ask = LeaseTasks(
                node=f"n{node}",
                incarnation="1",
                want=min(SLOTS, left),
                versions={MAIN: self._version},
                attempt=f"a{self._version}.{left}",
            )
            got = self._ledger.lease_tasks(ask).leases
            found.setdefault(node, []).extend(got)
            left, node = left - len(got), (node + 1) % self._nodes
            self._write()
        return found

    def _beat(self, node: int, attempts: list[str]) -> None:
        self._ledger.renew(
            Heartbeat(
                node=f"n{node}", incarnation="1", attempts=attempts, versions={MAIN: self._version}, capacity=SLOTS
            )
        )

    def _news(self, node: int, lease: TaskLease) -> CompleteTask:
        sample = SampleMeta(
            policy=MAIN,
            row=Row(unit="u", segment=self._version // 4, offset=lease.task.seed % (1 << 26), length=4096),
            tokens=1000,
            trained=900,
            oldest=self._version,
            newest=self._version,
            reward=float(lease.task.place % 2),
        )
        return CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=f"n{node}",
            reward=sample.reward,
            samples=[sample],
            calls=2,
            seconds=1.0,
            metrics={"turns": 2.0},
        )

    def _train(self) -> None:
        ask = LeaseBatch(
            policy=MAIN, incarnation="t", attempt=f"b{self._version}", groups=BATCH, version=self._version, wait=0
        )
        with self._timed("serve"):
            batch = self._ledger.lease_batch(ask).batch
        assert batch is not None
        with self._timed("commit"):
            self._ledger.commit_batch(
                CommitBatch(
                    policy=MAIN,
                    incarnation="t",
                    batch=batch.id,
                    attempt=batch.attempt,
                    version=self._version + 1,
                    metrics={},
                    step_seconds=1.0,
                    wait_seconds=0.0,
                    restorable=self._version,
                )
            )
            self._write(now=True)
        self._version += 1


def measure(nodes: int, steps: int, at_once: int, profile: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Microseconds of a sample by the call that takes them, and their sum."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        run = Run(Path(folder), nodes, steps, at_once)
        try:
            run.step()  # prepared once
            run.costs.clear()
            profile()
            for _ in range(steps):
                run.step()
        finally:
            run.close()
    found = {name: median(costs) for name, costs in run.costs.items()}
    return found | {"all": sum(found.values())}


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    report = Report("ledger")
    steps = 8 if given.quick else 40
    for nodes in (8, 256):
        for name, at_once in (("one", 1), ("many", 16)):
            for call, cost in measure(nodes, steps, at_once).items():
                report.add(f"{nodes} nodes, {name}: {call}", cost, None, unit="microseconds a sample")
    report.finish(given.json)


if __name__ == "__main__":
    main()
