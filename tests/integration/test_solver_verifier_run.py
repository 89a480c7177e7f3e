"""Two policies and three roles' answers, from the workflow to the ledger: each sample has its own reward."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from commands import Cli


@pytest.mark.slow
def test_a_solver_and_a_verifier_learn_at_once(cli: Cli) -> None:
    """After a few lessons: what matters here is that every answer is one sample with a reward of its own."""
    cli.run("fit", "pairs_warm", "trainer.steps=8", "trainer.batch_groups=16", "data.heldout=null")
    (model,) = (cli.cwd / "runs").glob("pairs_warm-*/model")
    run = cli.run(
        "run", "solver_verifier", f"policies.solver.model={model}", f"policies.verifier.model={model}",
        "trainer.steps=2", "trainer.batch_groups=2", "data.heldout.arguments.count=8", "dataflow.filters=[]",
        "options.balance=false",
    )  # fmt: skip
    with closing(sqlite3.connect(f"file:{run.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        found = {
            (policy, agent)
            for policy, agent in ledger.execute("SELECT DISTINCT policy, agent FROM samples WHERE trained > 0")
        }
        steps = dict(ledger.execute("SELECT policy, count(*) FROM steps GROUP BY policy"))
        # A task's reward is its trajectory's: that of the second try, or of the first of two first answers.
        apart = ledger.execute(
            "SELECT t.id, t.reward, s.reward FROM tasks t JOIN samples s ON s.grp = t.grp AND s.place = t.place "
            "WHERE t.state = 'done' AND s.agent = 'solver' AND s.turn = (SELECT max(o.turn) FROM samples o "
            "WHERE o.grp = s.grp AND o.place = s.place AND o.agent = 'solver') "
            "AND s.n = (SELECT min(f.n) FROM samples f "
            "WHERE f.grp = s.grp AND f.place = s.place AND f.agent = 'solver' AND f.turn = s.turn) "
            "AND t.reward != s.reward"
        ).fetchall()
    assert found == {("solver", "solver"), ("verifier", "verifier")}
    assert steps == {"solver": 2, "verifier": 2}
    assert not apart
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert any("episode/first" in line for line in lines)
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
