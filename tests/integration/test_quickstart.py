"""The README's promise: the quickstart learns to its target and ends there, within the staleness bound, balanced."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from advised import wrong_with
from commands import Cli
from rillflow.config import load_recipe
from rillflow.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
# The environment that `make quickstart` uses: by default the one in which these tests run.
VENV = os.environ.get("RILLFLOW_QUICKSTART_VENV", ".venv")


@pytest.mark.slow
def test_the_quickstart_learns_and_ends_at_its_target(cli: Cli) -> None:
    # By pip, as users have it, whatever CI fills its other environments with.
    run = cli.start_command("make", "-C", str(ROOT), "quickstart", f"VENV={VENV}", f"RUNS={cli.cwd / 'runs'}", UV="")
    assert run.wait(1200) == 0, run.output()[-4000:]
    folder, recipe = run.folder, load_recipe("quickstart")
    target = recipe.evaluation.target
    assert target is not None
    summary = json.loads((folder / "summary.json").read_text())
    heldout = summary["heldout"]
    assert heldout[0]["version"] == 0
    assert heldout[0]["reward"] <= 0.45
    assert heldout[-1]["reward"] >= target >= 0.9
    assert all(found["reward"] < target for found in heldout[:-1]), "the first round at the target is the last one"
    assert summary["end"] == "target reached"
    assert summary["target"] == {
        "reward": target,
        "reached": True,
        "version": heldout[-1]["version"],
        "step": heldout[-1]["version"],
    }
    metrics = read_metrics(folder / "metrics.jsonl", "agent")
    assert heldout[-1]["version"] <= len(metrics.steps) < recipe.policies["agent"].trainer.steps
    assert max(step["staleness_max"] for step in metrics.steps) <= 2
    assert metrics.steps[0]["ratio_max"] < 1 + 1e-4, "on fresh samples engine and trainer agree"
    assert wrong_with(folder) == []
    cli.run("audit", str(folder))
    assert "nothing to resume" in cli.run("resume", str(folder)).output()
    starts = re.findall(r"starting \(\d+ s\): .*", run.output())
    assert starts, "while it starts, a run says what its processes do"
    assert any("importing torch" in line or "loading the model" in line for line in starts)
    assert "no rollout node" not in run.output()
