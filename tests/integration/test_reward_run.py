"""A run whose reward is a list: graded in processes of its own, added up, and its parts written down."""

from __future__ import annotations

import json
import sqlite3

import pytest

from commands import Cli

SMALL = (
    "trainer.steps=1", "trainer.batch_groups=2", "dataflow.group_size=2", "dataflow.filters=[]", "rollout.episodes=8",
    "data.heldout.0.limit=4", "rollout.reward_timeout=120",
)  # fmt: skip


@pytest.mark.needs("reasoning-gym")
@pytest.mark.slow
def test_the_parts_of_a_reward_are_in_the_ledger(cli: Cli) -> None:
    short = "{name: length, options: {longest: 2, margin: 2, unit: characters}, weight: 0.5}"
    parts = f"reward=[{{reasoning_gym: {{strict: true}}}}, {short}]"
    run = cli.start("run", "reasoning_cpu", parts, *SMALL)
    assert run.wait(600) == 0, run.output()
    with sqlite3.connect(run.folder / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT reward, metrics FROM tasks WHERE state = 'done'").fetchall()
    assert rows
    for reward, told in rows:
        metrics = json.loads(told)
        assert metrics["reward/reasoning_gym"] in (0.0, 1.0)
        assert -1.0 <= metrics["reward/length"] <= 0.0
        assert reward == pytest.approx(metrics["reward/reasoning_gym"] + 0.5 * metrics["reward/length"])
    assert any(json.loads(told)["reward/length"] < 0 for _, told in rows)
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
