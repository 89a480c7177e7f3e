"""In deterministic mode a run that was killed and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, processes_of, steps_of, wait_until

DETERMINISTIC = [
    "runtime.deterministic=true",
    "dataflow.staleness=0",
    "trainer.steps=6",
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "dataflow.group_size=4",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
]


def final_weights(folder: Path) -> bytes:
    weights = folder / "weights" / "agent"
    head = json.loads((weights / "head.json").read_text())["head"]
    return (weights / f"v{head:08d}" / "model.safetensors").read_bytes()


def prompts_trained(folder: Path) -> list[float]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [step["reward"] for step in steps if "event" not in step]


@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(cli: Cli) -> None:
    alone = cli.run("run", "stockroom", *DETERMINISTIC).folder
    expected = final_weights(alone)
    for step in (json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()):
        if "event" not in step:
            assert step["consistency/tokens"] > 0
            assert step["consistency/max"] == 0.0, "engine and trainer agree to the bit"

    run = cli.start("run", "stockroom", *DETERMINISTIC)
    wait_until(lambda: run.folder != alone and steps_of(run.folder) >= 3, "three steps", 180)
    folder = run.folder
    victims = processes_of(folder)
    run.process.kill()
    for victim in victims.values():
        victim.kill()
    run.wait(10)
    wait_until(lambda: processes_of(folder) == {}, "all processes to be gone", 10)
    assert steps_of(folder) < 6, "killed too late to show anything"

    cli.run("resume", str(folder))
    assert final_weights(folder) == expected
    cli.run("audit", str(folder))
