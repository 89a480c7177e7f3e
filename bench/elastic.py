"""An elastic run: 1 rollout node, then 4, then 2, one of them 4 times slower, while a trainer trains.

    python -m bench.elastic [--quick] [--json FILE]

Real processes: dataflow service, storage unit, weight server, trainer, and nodes that join by URL and see nothing of
the run's folder. DEVICE TIME IS EMULATED: on a small machine nodes would share its cores, and more of them would not be
more capacity. So every decode step of a node's engine takes at least a declared time (80 ms; four times that for the
slow one), which is mostly sleep; everything else is what it is. The learning rate is tiny, so
that answers stay as long as they are and samples a second can be compared over time.

Capacity is in nodes of the usual speed: 1, then 3.25, then 1.25. What the second and third phase should bring is the
first one's samples a second times the capacity; the goal is to come within 10 % of it, to lose nothing (the audit
balances, no attempt fails), and a trainer that steps in every phase, in one and the same process.

How cost grows: a join fetches the weights once; a task costs the service the same however many nodes there are, but for
one look at every node's row at each lease.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import Report, parser
from bench.elastic_node import STEP_VARIABLE
from rillflow.clients.dataflow import DataflowClient
from rillflow.config import load_recipe
from rillflow.dataflow.audit import audit
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeList, RetireNode
from rillflow.wire import Client

STEP, SLOWER, EPISODES = 0.08, 4, 8
SETTLE = 6.0  # seconds after a change that are not counted: some of the slow node's episodes
OVERRIDES = (
    "trainer.steps=100000",
    "trainer.lr=1e-7",
    "trainer.batch_groups=4",
    "dataflow.staleness=6",
    "dataflow.filters=[]",
    "data.heldout=null",
    "evaluation.every=0",
    "trainer.checkpoint_every=1000",
    "runtime.weights_server=true",
    "rollout.refresh_every=1.0",
)
SERVICES = (("dataflow",), ("unit", "--name", "unit-0"), ("weights",), ("trainer",))


@dataclass
class Phase:
    """The measurements of a period with the same nodes."""

    capacity: float
    nodes: list[str]
    samples: float = 0.0  # a second
    steps: int = 0
    by_node: dict[str, float] = field(default_factory=dict)


@dataclass
class Elastic:
    """The results of a whole run."""

    phases: list[Phase]
    balanced: bool
    failed: int
    returned: dict[str, int]
    trainer_starts: int
    codes: dict[str, int]


class Run:
    """One run's processes."""

    def __init__(self, parent: Path, overrides: tuple[str, ...] = OVERRIDES) -> None:
        self.folder = RunFolder.create(load_recipe("stockroom", overrides), parent)
        self.token = parent / "token"
        self.token.write_text(self.folder.token_of("node"))
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for role, *options in SERVICES:
            self.services[role] = self._process(role, ["-m", "rillflow", role, str(self.folder.root), *options])
            self.wait_for(
                lambda role=role: role == "trainer" or self.folder.endpoint(_endpoint(role)), f"{role} to listen"
            )

    def join(self, name: str, step: float) -> None:
        words = ["-m", "bench.elastic_node", "--join", str(self.folder.endpoint("dataflow")), "--name", name]
        words += ["--token-file", str(self.token), "--episodes", str(EPISODES)]
        self.nodes[name] = self._process(name, words, {STEP_VARIABLE: str(step)})

    def _process(
        self, name: str, words: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with open(self.folder.log(name), "ab") as output:
            return subprocess.Popen(
                [sys.executable, *words],
                stdout=output,
                stderr=output,
                env={**os.environ, **threads, **(environment or {})},
                cwd=Path(__file__).resolve().parent.parent,
            )

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                for log in sorted((self.folder.root / "logs").iterdir()):
                    print(f"--- {log.name}\n{log.read_text()[-1000:]}", file=sys.stderr)
                raise TimeoutError(f"waited {seconds:.0f} s for {what}")
            time.sleep(0.1)

    # ------------------------------------------------------------ the service

    def told(self) -> NodeList:
        return self.ask(lambda client: client.nodes())

    def ask(self, call):  # type: ignore[no-untyped-def]
        async def asked():  # type: ignore[no-untyped-def]
            client = DataflowClient(Client(str(self.folder.endpoint("dataflow")), self.folder.token, peer="dataflow"))
            try:
                return await call(client)
            finally:
                await client.close()

        return asyncio.run(asked())

    def playing(self, names: list[str]) -> bool:
        """Return whether exactly these nodes are live and have ended an episode each."""
        there = {node.name: node.completed for node in self.told().nodes if node.state == "healthy"}
        return there.keys() == set(names) and all(there.values())

    def retire(self, name: str, drain: float = 30.0) -> None:
        self.ask(lambda client: client.retire(RetireNode(node=name, drain=drain)))

    # ------------------------------------------------------------ the ledger

    def count(self, query: str, *values: float) -> list[tuple[str, int]]:
        with closing(sqlite3.connect(f"file:{self.folder.ledger}?mode=ro", uri=True)) as ledger:
            return ledger.execute(query, values).fetchall()

    def measure(self, phase: Phase, seconds: float) -> None:
        """Count the samples that are accepted in the next `seconds`."""
        time.sleep(SETTLE)
        began, steps = time.time(), self.steps()
        time.sleep(seconds)
        ended = time.time()
        rows = self.count(
            "SELECT a.node, sum(t.samples) FROM attempts a JOIN tasks t ON t.grp = a.grp AND t.place = a.place "
            "WHERE a.state = 'done' AND a.ended_at BETWEEN ? AND ? GROUP BY a.node",
            began,
            ended,
        )
        phase.by_node = {node: samples / (ended - began) for node, samples in rows}
        phase.samples, phase.steps = sum(phase.by_node.values()), self.steps() - steps

    def steps(self) -> int:
        return int(self.count("SELECT 'steps', count(*) FROM steps")[0][1])

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """Stop the run, not its processes: the nodes learn of it and end."""
        self.ask(lambda client: client.stop("measured"))

    def code(self, name: str, seconds: float = 60.0) -> int:
        return self.nodes[name].wait(seconds)

    def close(self) -> None:
        processes = [*self.nodes.values(), *reversed(self.services.values())]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _endpoint(role: str) -> str:
    return "unit-0" if role == "unit" else role


def play(parent: Path, seconds: float, *, step: float = STEP) -> Elastic:
    """Run the three phases, each measured for `seconds`."""
    run = Run(parent)
    usual, slow = ["usual-0", "usual-1", "usual-2"], "slow-0"
    phases = [
        Phase(1.0, usual[:1]),
        Phase(3 + 1 / SLOWER, [*usual, slow]),
        Phase(1 + 1 / SLOWER, [usual[2], slow]),
    ]
    try:
        run.start()
        for phase in phases:
            for name in phase.nodes:
                if name not in run.nodes:
                    run.join(name, step * SLOWER if name == slow else step)
            gone = [name for name in run.nodes if name not in phase.nodes]
            for name in gone:
                run.retire(name)
            run.wait_for(lambda phase=phase: run.playing(phase.nodes), f"{', '.join(phase.nodes)} to play")
            run.measure(phase, seconds)
        alive = run.services["trainer"].poll() is None
        run.stop()
        codes = {name: run.code(name) for name in run.nodes}
        return _left(run, phases, codes, alive)
    finally:
        run.close()


def _left(run: Run, phases: list[Phase], codes: dict[str, int], alive: bool) -> Elastic:
    report = audit(run.folder.ledger)
    return Elastic(
        phases,
        balanced=report.balanced,
        failed=int(run.count("SELECT 'failed', count(*) FROM attempts WHERE state = 'failed'")[0][1]),
        returned=dict(run.count("SELECT cause, count(*) FROM attempts WHERE state = 'returned' GROUP BY cause")),
        trainer_starts=1 if alive else 0,
        codes=codes,
    )


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("elastic")
    with tempfile.TemporaryDirectory() as parent:
        found = play(Path(parent), 15.0 if arguments.quick else 30.0)
    first = found.phases[0]
    for phase in found.phases:
        due = first.samples * phase.capacity
        # Too much would be as wrong as too little: then the first phase was not full.
        report.add(
            f"{len(phase.nodes)} nodes, capacity {phase.capacity}", phase.samples, due, unit="samples/s", goal=0.9
        )
        print(f"{phase.nodes}: {phase.steps} steps; {_rounded(phase.by_node)} samples/s", file=sys.stderr)
    least = min(phase.steps for phase in found.phases)
    report.add("steps of the trainer in the least phase", least, 1, unit="steps", goal=1)
    report.add("audit balances, nothing failed", float(found.balanced and not found.failed), 1, unit="yes", goal=1)
    report.add("the trainer is the process it was", found.trainer_starts, 1, unit="yes", goal=1)
    print(f"returned {found.returned}, exit codes {found.codes}", file=sys.stderr)
    report.finish(arguments.json)


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(rate, 2) for name, rate in sorted(rates.items())}


if __name__ == "__main__":
    main()
