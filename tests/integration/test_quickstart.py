"""The README's promise: the quickstart learns, within the staleness bound, and its books balance."""

from __future__ import annotations

import json

import pytest

from commands import Cli
from rillflow.observe.metrics import read_metrics


@pytest.mark.slow
def test_the_quickstart_learns(cli: Cli) -> None:
    folder = cli.run("run", "quickstart", seconds=600).folder
    heldout = json.loads((folder / "summary.json").read_text())["heldout"]
    assert heldout[0]["version"] == 0
    assert heldout[0]["reward"] <= 0.45
    assert heldout[-1]["version"] == 24
    assert heldout[-1]["reward"] >= 0.85
    steps = read_metrics(folder / "metrics.jsonl", "agent").steps
    assert max(step["staleness_max"] for step in steps) <= 2
    assert steps[0]["ratio_max"] < 1 + 1e-4, "on fresh samples engine and trainer agree"
    cli.run("audit", str(folder))
