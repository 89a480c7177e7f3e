"""One policy, two agents: each is compared with its like alone, from the workflow to the statistics in the batch."""

from __future__ import annotations

import json
import sqlite3

import pytest

from advised import wrong_with
from commands import Cli

SMALL = ("trainer.steps=3", "trainer.batch_groups=2", "evaluation.every=0", "data.heldout.arguments.count=8")


@pytest.mark.slow
def test_two_agents_of_one_policy(cli: Cli) -> None:
    run = cli.run("run", "two_agents", *SMALL)
    with sqlite3.connect(f"file:{run.folder / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        found = dict(ledger.execute("SELECT agent, count(*) FROM samples WHERE trained > 0 GROUP BY agent"))
        uneven = ledger.execute("SELECT count(*) FROM samples GROUP BY grp, place HAVING count(*) != 2").fetchall()
    assert set(found) == {"", "checker"}
    assert found[""] == found["checker"]
    assert not uneven
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
    assert wrong_with(run.folder) == []
