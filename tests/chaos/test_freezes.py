"""Every kind of process of a run is frozen for twenty seconds: none dies of it, and the run goes on."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from commands import Cli, all_processes_of, steps_of, wait_until

FROZEN = 20.0
RUN = [
    "trainer.steps=1000",
    "trainer.batch_groups=2",
    "dataflow.group_size=4",
    "trainer.checkpoint_every=100",
    "dataflow.node_timeout=4",
    "dataflow.task_lease=8",
    "dataflow.units.count=2",
    "rollout.nodes=2",
    "rollout.episodes=16",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
    "runtime.restarts=0",  # a death ends the run
]


def by_name(folder: Path) -> dict[str, psutil.Process]:
    """dataflow, unit-0, rollout-1, agent (the trainer of that policy), …"""
    found = {}
    for role, process in all_processes_of(folder):
        words = process.info["cmdline"]
        found[role if role == "dataflow" else words[words.index(str(folder)) + 2]] = process
    return found


@contextmanager
def frozen(*processes: psutil.Process) -> Iterator[None]:
    """For twenty seconds, in which the body's work is done first."""
    end = time.monotonic() + FROZEN
    for process in processes:
        process.suspend()
    try:
        yield
        time.sleep(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def played(folder: Path, node: str) -> int:
    """Episodes of a node that the ledger has taken."""
    with closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        row = ledger.execute("SELECT completed FROM nodes WHERE name = ?", (node,)).fetchone()
        return int(row[0]) if row else 0


def further(folder: Path, steps: int) -> None:
    begin = steps_of(folder)
    wait_until(lambda: steps_of(folder) >= begin + steps, f"{steps} more steps", 600)


@pytest.mark.chaos
def test_a_freeze_of_twenty_seconds_ends_nothing(cli: Cli) -> None:
    run = cli.start("run", "stockroom", *RUN)
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 2, "two steps", 600)
    folder = run.folder
    wait_until(lambda: all(played(folder, node) for node in ("rollout-0", "rollout-1")), "episodes of both nodes")
    there = by_name(folder)

    with frozen(there["rollout-0"], there["unit-0"]):
        further(folder, 2)  # the other node's episodes are enough, and rows go to the other unit
    before = played(folder, "rollout-0")
    wait_until(lambda: played(folder, "rollout-0") > before, "episodes of the node that was frozen", 600)

    for name in ("agent", "dataflow"):
        with frozen(there[name]):
            pass
        further(folder, 2)

    assert by_name(folder) == there, "a process has been started again"
    run.interrupt()
    assert run.wait(60) == 130, run.output()[-4000:]
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], audited
