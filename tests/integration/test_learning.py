"""GRPO and PPO with a critic learn the quickstart, asynchronous and colocated (test_quickstart has the fourth run).

The short form shows that PPO gets better when colocated: with the quickstart, both algorithms and both modes learn. The
long form shows how good each run is after a dozen steps.
"""

from __future__ import annotations

import json

import pytest

from advised import wrong_with
from commands import Cli
from rillflow.observe.metrics import read_metrics
from soak import SOAK, repetitions

STEPS = repetitions(8, 12)
GAIN = 0.2  # of the held-out reward; eight steps usually gain 0.4


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("recipe", repetitions(["ppo_colocated"], ["quickstart_colocated", "ppo", "ppo_colocated"]))
def test_a_few_steps_are_enough_to_learn(cli: Cli, recipe: str) -> None:
    folder = cli.run("run", recipe, f"trainer.steps={STEPS}", "evaluation.every=0", seconds=600).folder
    before, after = json.loads((folder / "summary.json").read_text())["heldout"]
    assert (before["version"], after["version"]) == (0, STEPS)
    assert before["reward"] <= 0.45
    assert after["reward"] >= before["reward"] + GAIN
    if SOAK:
        assert after["reward"] >= 0.65
    steps = read_metrics(folder / "metrics.jsonl", "agent").steps
    assert max(step["staleness_max"] for step in steps) <= (0 if "colocated" in recipe else 2)
    if "ppo" in recipe:
        assert steps[-1]["value_loss"] < steps[0]["value_loss"], "the critic learns too"
    assert wrong_with(folder) == []
    cli.run("audit", str(folder))
