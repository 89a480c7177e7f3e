"""A colocated run is stopped and resumed, and its process is killed (kill -9) twice: the run finishes."""

from __future__ import annotations

import json

import pytest

from commands import Cli, processes_of, steps_of, wait_until

STEPS = 10
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.batch_groups=2",
    "dataflow.group_size=4",
    "trainer.checkpoint_every=2",
    "dataflow.node_timeout=4",
    "dataflow.staleness=1",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
]


@pytest.mark.chaos
def test_a_colocated_trainer_is_stopped_and_then_killed_twice(cli: Cli) -> None:
    run = cli.start("run", "quickstart_colocated", *RUN)
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 2, "two steps", 600)
    folder = run.folder
    run.interrupt()
    assert run.wait(60) == 130
    assert processes_of(folder) == {}

    resumed = cli.start("resume", str(folder))
    for _ in range(2):
        wanted = steps_of(folder) + 2
        wait_until(lambda wanted=wanted: steps_of(folder) >= wanted, f"step {wanted}", 600)
        victim = processes_of(folder)["trainer"]
        victim.kill()
        wait_until(lambda victim=victim: processes_of(folder).get("trainer", victim) != victim, "another trainer", 120)
    assert resumed.wait(600) == 0, resumed.output()[-4000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], audited
