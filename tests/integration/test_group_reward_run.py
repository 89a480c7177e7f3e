"""A run from Python whose reward ranks the answers of a group: played on two nodes, scored where groups are whole."""

from __future__ import annotations

import json
import sqlite3
import sys

import pytest

import rillflow
from commands import Cli
from rillflow.runtime.warm import PATH_ENV

SMALL = (
    "trainer.steps=2", "trainer.batch_groups=4", "dataflow.group_size=4", "dataflow.filters=[]", "rollout.episodes=8",
    "data.heldout.arguments.count=4", "rollout.nodes=2",
)  # fmt: skip
PROGRAM = """
import json, sys
import rillflow

run = rillflow.run("stockroom_ranked", *sys.argv[1:])
kept = len(run.trajectories(status="done"))
print(json.dumps({"steps": run.summary["steps"], "name": run.recipe.name, "kept": kept, "folder": str(run.folder)}))
"""


@pytest.mark.slow
def test_a_group_is_ranked_and_trained(cli: Cli) -> None:
    run = cli.start_command(sys.executable, "-c", PROGRAM, *SMALL, **{PATH_ENV: cli.warm.path()})
    assert run.wait(600) == 0, run.output()
    told = json.loads(run.output().splitlines()[-1])
    assert told["folder"] == str(run.folder)
    assert (told["name"], told["steps"]) == ("stockroom_ranked", 2)
    assert told["kept"] == len(rillflow.trajectories(run.folder, status="done")) > 0
    with sqlite3.connect(run.folder / "ledger.sqlite") as ledger:
        rows = ledger.execute(
            "SELECT t.reward, t.metrics, s.reward FROM tasks t JOIN samples s ON s.grp = t.grp AND s.place = t.place "
            "JOIN groups g ON g.id = t.grp WHERE t.state = 'done' AND g.state IN ('trained', 'evaluated')"
        ).fetchall()
        waiting = ledger.execute("SELECT count(*) FROM groups WHERE scoring = 1").fetchone()[0]
    assert rows
    assert waiting == 0
    for reward, told_metrics, of_sample in rows:
        metrics = json.loads(told_metrics)
        assert metrics["reward/reward"] in (0.0, 1.0)
        assert reward == of_sample == pytest.approx(metrics["reward/reward"] + 0.2 * metrics["reward/brief"])
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
