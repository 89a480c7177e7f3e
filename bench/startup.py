"""How long Rillflow takes to start: the command line, a run up to its first sample, and each process of a run.

    python -m bench.startup [--quick] [--json FILE]

Wall time for what a person waits for: `rillflow --help`, and `rillflow run quickstart` up to the first row in the
ledger's table of samples. Processor time (user and system) for processes: from their fork or exec until they have said
where they listen, which is when a node begins to lease tasks. The fork server's is until it forks the first process:
it is spent once for all trainers and nodes.

The goals are upper limits, for two quiet cores. The peer of a node's start is `from trl import GRPOTrainer`, which a
TRL process does before anything else, where the oracles' environment exists.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.common import Report, parser

ROOT = Path(__file__).resolve().parent.parent
HELP, FIRST_SAMPLE, NODE = 0.5, 8.0, 2.5  # seconds: the goals
PROCESSES = {"dataflow": "dataflow", "unit": "unit-0", "rollout": "rollout-0"}  # endpoints by role
_DEADLINE = 300.0
_LOOK = 0.02


@dataclass
class Start:
    """One start of the quickstart: seconds to the first sample, and processor seconds by role."""

    wall: float = 0.0
    processor: dict[str, float] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--python", default=str(ROOT / ".venv-oracle/bin/python"), help="that has TRL")
    arguments = made.parse_args()
    repeats = 2 if arguments.quick else 5
    helps = [_wall([sys.executable, "-m", "rillflow", "--help"]) for _ in range(2 * repeats + 1)][1:]
    walls = [_started(processes=False).wall for _ in range(repeats)]
    starts = [_started(processes=True) for _ in range(repeats)]
    peer, reason = _peer(arguments.python)
    report = Report("startup")
    report.add("rillflow --help", statistics.median(helps), None, unit="s", limit=HELP)
    report.add(
        "from the command to the first sample of the quickstart",
        statistics.median(walls),
        None,
        unit="s",
        limit=FIRST_SAMPLE,
    )
    node = _median(starts, "rollout")
    report.add(
        "node, to its first lease", node, peer, unit="processor s", limit=NODE, less_is_better=True, reason=reason
    )
    for role in ("dataflow", "unit", "forkserver", "run"):
        report.add(role, _median(starts, role), None, unit="processor s")
    report.finish(arguments.json)


def _median(starts: Sequence[Start], role: str) -> float:
    return statistics.median(start.processor[role] for start in starts)


def _wall(command: Sequence[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_DEADLINE)
    return time.perf_counter() - begin


def _peer(python: str) -> tuple[float | None, str]:
    """Processor seconds of importing TRL's trainer, or why they are not known."""
    if not Path(python).exists():
        return None, "`bash scripts/make_venv.sh .venv-oracle oracle` makes TRL's environment"
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run(
            [python, "-c", "from trl import GRPOTrainer"], check=True, capture_output=True, timeout=_DEADLINE
        )
        after = os.times()
        spent = (after.children_user - before.children_user, after.children_system - before.children_system)
        seconds.append(sum(spent))
    return statistics.median(seconds), ""


def _started(*, processes: bool) -> Start:
    """Start the quickstart, wait for its first sample, and stop it. To look at its `processes` delays them."""
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as runs:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "rillflow", "run", "quickstart", "--runs", runs]
        with open(Path(runs) / "output", "wb") as output:
            cold = {**os.environ, "RILLFLOW_WARM": ""}  # no process that has imported torch before
            run = subprocess.Popen(command, stdout=output, stderr=output, env=cold)
        start = Start()
        try:
            while not _has_sample(Path(runs)):
                if run.poll() is not None or time.perf_counter() - begin > _DEADLINE:
                    raise SystemExit(f"no first sample:\n{(Path(runs) / 'output').read_text()[-3000:]}")
                if processes:
                    _look(Path(runs), run.pid, start)
                time.sleep(_LOOK)
            start.wall = time.perf_counter() - begin
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(60.0)
        return start


def _look(runs: Path, run: int, start: Start) -> None:
    """Note the processor seconds that each process has spent so far, up to the moment it has said where it listens."""
    ready = {path.stem for path in runs.glob("*/endpoints/*.json")}
    for process in psutil.Process(run).children(recursive=True):
        try:
            words, times = process.cmdline(), process.cpu_times()
        except psutil.Error:
            continue
        role = next((name for name in PROCESSES if name in words), "")
        if "rillflow.runtime.forkserver" in words and not process.children():
            role = "forkserver"
        if role and role not in start.ready:
            start.processor[role] = times.user + times.system
            if PROCESSES.get(role) in ready:
                start.ready.add(role)
    own = psutil.Process(run).cpu_times()
    start.processor["run"] = own.user + own.system


def _has_sample(runs: Path) -> bool:
    for ledger in runs.glob("*/ledger.sqlite"):
        try:
            with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as database:
                return bool(database.execute("SELECT EXISTS (SELECT 1 FROM samples)").fetchone()[0])
        except sqlite3.Error:  # it is being made
            return False
    return False


if __name__ == "__main__":
    main()
