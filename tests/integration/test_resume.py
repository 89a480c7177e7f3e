"""In deterministic mode a run that was killed and resumed ends with the same weights, bit for bit.

Colocated or not: who samples when changes nothing. All runs are compared with one that was let be.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, processes_of, steps_of, wait_until

pytestmark = pytest.mark.slow

DETERMINISTIC = [
    "runtime.deterministic=true",
    "dataflow.staleness=0",
    "trainer.steps=6",
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "dataflow.group_size=4",
    "data.heldout=null",
]


def final_weights(folder: Path) -> bytes:
    weights = folder / "weights" / "agent"
    head = json.loads((weights / "head.json").read_text())["head"]
    return (weights / f"v{head:08d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(shared_cli: Cli) -> Path:
    """The folder of a run that was not killed."""
    return shared_cli.run("run", "stockroom", *DETERMINISTIC).folder


def test_engine_and_trainer_agree_to_the_bit(alone: Path) -> None:
    lines = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert len(steps) == 6
    for step in steps:
        assert step["consistency/tokens"] > 0
        assert step["consistency/max"] == 0.0


@pytest.mark.parametrize("recipe", ["stockroom", "quickstart_colocated"])
def test_killed_and_resumed_is_bit_identical(cli: Cli, alone: Path, recipe: str) -> None:
    run = cli.start("run", recipe, *DETERMINISTIC)
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 3, "three steps", 600)
    folder = run.folder
    victims = processes_of(folder)
    run.process.kill()
    for victim in victims.values():
        victim.kill()
    run.wait(120)
    wait_until(lambda: processes_of(folder) == {}, "all processes to be gone", 120)
    assert steps_of(folder) < 6, "killed too late to show anything"

    cli.run("resume", str(folder))
    assert final_weights(folder) == final_weights(alone)
    cli.run("audit", str(folder))
