"""A training run in which something is killed, frozen or cut off every few seconds: it finishes.

Two policies, three nodes, two units and two engine processes; the whole run is stopped at the end and resumed for its
last step. The short form does every fault to every kind of process once. The long form takes ten minutes, after which
the policies have learned; RILLFLOW_CHAOS_SECONDS sets another length.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from mayhem import KINDS, Mayhem

from commands import Cli, Started, all_processes_of, steps_of, wait_until
from soak import SOAK, repetitions

SECONDS = float(os.environ.get("RILLFLOW_CHAOS_SECONDS", repetitions("45", "600")))
EVERY = repetitions(3.0, 5.0)
SEED = int(os.environ.get("RILLFLOW_CHAOS_SEED", "1"))
LEAST = repetitions(4, 24)  # steps of each policy; 24 are enough to learn
RUN = [
    "trainer.steps=1000",
    "trainer.batch_groups=4",
    "trainer.lr=2.5e-4",  # batches are half of the recipe's: at its own rate what was learnt may be lost again
    "trainer.checkpoint_every=1",
    "dataflow.units.count=2",
    "dataflow.node_timeout=6",
    "dataflow.task_lease=10",
    "dataflow.batch_lease=30",
    "rollout.nodes=3",
    "rollout.engines=2",
    "rollout.episodes=24",
    f"data.heldout.arguments={{split: heldout, count: {repetitions(8, 64)}, seed: 2}}",
    "runtime.restarts=1000",
]


def steps_by_policy(folder: Path) -> dict[str, int]:
    """Steps of the line of weights that lives."""
    with closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        return dict(ledger.execute("SELECT name, steps FROM policies"))


def finish(cli: Cli, run: Started) -> None:
    """Ctrl-C, then a resume of the same run, of which each policy is left one step, or more where it was slow."""
    folder = run.folder
    run.interrupt()
    assert run.wait(60) == 130, run.output()[-4000:]
    assert not list(all_processes_of(folder))
    path = folder / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    for name, steps in steps_by_policy(folder).items():
        recipe["policies"][name]["trainer"]["steps"] = max(steps + 1, LEAST)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    cli.run("resume", str(folder), seconds=600)


@pytest.mark.chaos
@pytest.mark.soak
def test_a_run_under_faults_of_every_kind_finishes_and_learns(cli: Cli) -> None:
    run = cli.start("run", "two_policies", *RUN)
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 2, "two steps", 600)
    folder = run.folder
    mayhem = Mayhem(folder, SEED, EVERY)
    mayhem.run(SECONDS, over=lambda: run.process.poll() is not None)
    story = "\n".join(mayhem.told)
    print(story, mayhem.faults, mayhem.kinds, steps_by_policy(folder))
    assert run.process.poll() is None, f"{story}\n{run.output()[-4000:]}"
    assert sum(mayhem.faults.values()) >= SECONDS / mayhem.every - 1
    assert set(mayhem.kinds) == set(KINDS), mayhem.kinds
    finish(cli, run)
    before, *_, after = json.loads((folder / "summary.json").read_text())["heldout"]
    if SOAK:
        assert after["reward"] >= before["reward"] + 0.15, f"{story}\n{before} {after}"
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"], f"{story}\n{audited}"
