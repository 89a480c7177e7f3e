"""The end of each process once during a run, by kill -9 or by SIGTERM: the run finishes and the audit balances."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from commands import Cli, processes_of, steps_of, wait_until

RUN = [
    "trainer.steps=14",
    "trainer.batch_groups=4",
    "trainer.checkpoint_every=3",
    "dataflow.node_timeout=4",
    "data.heldout.arguments={split: heldout, count: 16, seed: 2}",
]


def end_and_wait_for_another(folder: Path, role: str, number: signal.Signals) -> None:
    victim = processes_of(folder)[role]
    victim.send_signal(number)
    wait_until(lambda: processes_of(folder).get(role, victim) != victim, f"a new {role}", 30)


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_each_process_is_ended_once(cli: Cli, number: signal.Signals) -> None:
    run = cli.start("run", "stockroom", *RUN)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    for kills, role in enumerate(("rollout", "trainer", "unit", "dataflow"), 1):
        wait_until(lambda kills=kills: steps_of(folder) >= 3 * kills, f"step {3 * kills}", 120)
        end_and_wait_for_another(folder, role, number)
    assert run.wait(240) == 0, run.output()[-4000:]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 14
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], audited
