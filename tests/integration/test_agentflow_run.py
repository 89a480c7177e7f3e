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
    "trainer.steps=1", "trainer.batch_groups=2", "dataflow.filters=[]", "data.heldout=[]", "rollout.episodes=8",
    "rollout.episode_timeout=240", "options.max_steps=2",
]  # fmt: skip
PRM = "options.process_reward"


@pytest.mark.slow
def test_from_continuations_to_labels_to_step_rewards(cli: Cli) -> None:
    played = cli.run("run", "agentflow_labels", *SMALL, f"{PRM}.continuations=1", f"{PRM}.actions=3").folder
    assert asked(played, "SELECT DISTINCT agent FROM samples") == ["planner"]  # continuations are not for trainers
    labels, held = cli.cwd / "labels.jsonl", cli.cwd / "held.jsonl"
    cli.run("label", str(played), "--out", str(labels), "--heldout", str(held))
    rows = [json.loads(line) for line in labels.read_text().splitlines()]
    assert rows
    assert all(0 <= step["label"] <= 1 for row in rows for step in row["steps"])
    fitted = cli.run(
        "fit", "agentflow_prm", "trainer.steps=2", "trainer.batch_groups=2", f"data.train.path={labels}",
        "data.heldout=null",
    ).folder  # fmt: skip
    arguments = ["run", "agentflow_pro", *SMALL, f"{PRM}.model={fitted / 'model'}", f"{PRM}.actions=3"]
    assert "was never measured" in cli.run(*arguments, code=2).output()
    pro = cli.run(*arguments, f"{PRM}.gate=false").folder
    found = asked(pro, "SELECT count(*) FROM samples WHERE trained > 0 GROUP BY grp, place, turn")
    assert set(found) == {3}, "three decisions from every state"
    assert len(set(asked(pro, "SELECT reward FROM samples"))) > 2  # scores of a model, not outcomes
    assert json.loads(cli.run("audit", str(pro), "--json").output())["balanced"]


def asked(folder: Path, query: str) -> list[object]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        return [value for (value,) in ledger.execute(query)]
