"""A real run over two ledgers, in which a ledger's process, a node and the trainer are each killed once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from commands import Cli, all_processes_of, steps_of, wait_until

pytestmark = pytest.mark.slow

STEPS = 16
RUN = [
    "dataflow.ledgers=2",
    f"trainer.steps={STEPS}",
    "trainer.batch_groups=2",
    "dataflow.group_size=4",
    "trainer.checkpoint_every=3",
    "dataflow.node_timeout=4",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
]
VICTIMS = ("dataflow --ledger 1", "rollout", "trainer", "dataflow")


def process(folder: Path, what: str) -> psutil.Process | None:
    """The process of a role; of the dataflow services the one with these options."""
    role, *options = what.split()
    for found, one in all_processes_of(folder):
        words = one.info["cmdline"]
        if found == role and ("--ledger" in words) == bool(options):
            return one
    return None


def kill_and_wait_for_another(folder: Path, what: str) -> None:
    victim = process(folder, what)
    assert victim is not None, what
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: process(folder, what) not in (None, victim), f"a new {what}", 120)


def test_a_run_over_two_ledgers_is_exact_whatever_is_killed(cli: Cli) -> None:
    run = cli.start("run", "stockroom", *RUN)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    for victim in VICTIMS:
        wanted = steps_of(folder) + 1
        wait_until(lambda wanted=wanted: steps_of(folder) >= wanted, f"step {wanted}", 600)
        kill_and_wait_for_another(folder, victim)
    assert run.wait(600) == 0, run.output()[-4000:]
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], [identity for identity in audited["identities"] if not identity["ok"]]
    names = {identity["name"] for identity in audited["identities"]}
    assert "ledger 0: agent: steps = committed batches" in names
    assert "ledger 1: agent: steps = committed batches" in names
    assert audited["counts"]["steps"] == STEPS
    assert audited["counts"]["train.trained"] == 2 * STEPS
    assert (folder / "ledgers" / "1" / "ledger.sqlite").is_file()
