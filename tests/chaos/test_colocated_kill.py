"""kill -9 of the process that samples and trains, once while it samples and once at any moment: the run finishes."""

from __future__ import annotations

import json

import pytest

from commands import Cli, processes_of, steps_of, wait_until


@pytest.mark.chaos
def test_a_colocated_trainer_is_killed_twice(cli: Cli) -> None:
    run = cli.start(
        "run", "quickstart_colocated", "trainer.steps=8", "trainer.batch_groups=2", "trainer.checkpoint_every=2",
        "dataflow.node_timeout=4", "dataflow.staleness=1",
        "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
    )  # fmt: skip
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    for step in (3, 6):
        wait_until(lambda step=step: steps_of(folder) >= step, f"step {step}", 120)
        victim = processes_of(folder)["trainer"]
        victim.kill()
        wait_until(lambda victim=victim: processes_of(folder).get("trainer", victim) != victim, "another trainer", 30)
    assert run.wait(240) == 0, run.output()[-4000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 8
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], audited
