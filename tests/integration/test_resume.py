"""In deterministic mode a run that was killed and resumed ends with the same weights, bit for bit.

Asynchronous and colocated runs have the very same weights: who samples when changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, processes_of, steps_of, wait_until

STEPS = 5
DETERMINISTIC = [
    "runtime.deterministic=true",
    "dataflow.staleness=0",
    f"trainer.steps={STEPS}",
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "dataflow.group_size=4",
    "rollout.episodes=16",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def final_weights(folder: Path) -> bytes:
    weights = folder / "weights" / "agent"
    head = json.loads((weights / "head.json").read_text())["head"]
    return (weights / f"v{head:08d}" / "model.safetensors").read_bytes()


def killed_and_resumed(cli: Cli, recipe: str) -> bytes:
    """The weights at the end of a run of which every process was killed after its third step."""
    run = cli.start("run", recipe, *DETERMINISTIC)
    wait_until(lambda: any(path.name.startswith(f"{recipe}-") for path in run.runs.iterdir()), "the run folder")
    folder = max(path for path in run.runs.iterdir() if path.name.startswith(f"{recipe}-"))
    wait_until(lambda: steps_of(folder) >= 3, "three steps", 240)
    victims = processes_of(folder)
    run.process.kill()
    for victim in victims.values():
        victim.kill()
    run.wait(10)
    wait_until(lambda: processes_of(folder) == {}, "all processes to be gone", 10)
    assert steps_of(folder) < STEPS, "killed too late to show anything"
    cli.run("resume", str(folder))
    cli.run("audit", str(folder))
    return final_weights(folder)


def test_killed_and_resumed_is_bit_identical(cli: Cli) -> None:
    alone = cli.run("run", "quickstart", *DETERMINISTIC).folder
    for step in (json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()):
        if "event" not in step:
            assert step["consistency/tokens"] > 0
            assert step["consistency/max"] == 0.0, "engine and trainer agree to the bit"
    alone = alone.rename(alone.with_name("alone"))
    expected = final_weights(alone)
    assert killed_and_resumed(cli, "quickstart") == expected
    assert killed_and_resumed(cli, "quickstart_colocated") == expected
