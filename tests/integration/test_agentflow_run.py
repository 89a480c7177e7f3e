"""The whole way of AgentFlow-Pro with the user's commands: play, label, fit a process reward model, play with it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from commands import Cli

# Small, and with groups of equal rewards kept: a policy that has learned nothing solves nothing.
SMALL = [
    "trainer.steps=1", "trainer.batch_groups=2", "dataflow.group_size=2", "dataflow.filters=[]", "data.heldout=[]",
    "rollout.episodes=8", "rollout.episode_timeout=240", "options.max_steps=2",
]  # fmt: skip


@pytest.mark.slow
def test_from_episodes_to_labels_to_step_rewards(cli: Cli) -> None:
    played = cli.run("run", "agentflow", *SMALL).folder
    assert asked(played, "SELECT DISTINCT agent FROM samples") == ["planner"]  # the verifier's are not for trainers
    labels = cli.cwd / "labels.jsonl"
    cli.run("label", str(played), "--out", str(labels))
    rows = [json.loads(line) for line in labels.read_text().splitlines()]
    assert rows
    assert all(0 <= step["label"] <= 1 for row in rows for step in row["steps"])
    fitted = cli.run("fit", "agentflow_prm", "trainer.steps=2", "trainer.batch_groups=2", f"data.train.path={labels}")
    pro = cli.run("run", "agentflow_pro", *SMALL, f"options.process_reward={fitted.folder / 'model'}").folder
    rewards = asked(pro, "SELECT reward FROM samples")
    assert len(set(rewards)) > 2  # scores of a model, not outcomes
    assert json.loads(cli.run("audit", str(pro), "--json").output())["balanced"]


def asked(folder: Path, query: str) -> list[object]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        return [value for (value,) in ledger.execute(query)]
