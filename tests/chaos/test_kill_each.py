"""The end of each process during a run, once by kill -9 and once by SIGTERM: the run finishes, the audit balances."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from commands import Cli, processes_of, steps_of, wait_until

STEPS = 24  # more than are made while eight processes are ended and started again
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.batch_groups=2",
    "dataflow.group_size=4",
    "trainer.checkpoint_every=3",
    "dataflow.node_timeout=4",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
]
ROLES = ("rollout", "trainer", "unit", "dataflow")


def end_and_wait_for_another(folder: Path, role: str, number: signal.Signals) -> None:
    victim = processes_of(folder)[role]
    victim.send_signal(number)
    wait_until(lambda: processes_of(folder).get(role, victim) != victim, f"a new {role}", 120)


@pytest.mark.chaos
def test_each_process_is_ended_by_each_signal(cli: Cli) -> None:
    run = cli.start("run", "stockroom", *RUN)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    for number in (signal.SIGKILL, signal.SIGTERM):
        for role in ROLES:
            wanted = steps_of(folder) + 1
            wait_until(lambda wanted=wanted: steps_of(folder) >= wanted, f"step {wanted}", 600)
            end_and_wait_for_another(folder, role, number)
    assert run.wait(600) == 0, run.output()[-4000:]
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], audited
