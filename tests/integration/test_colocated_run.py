"""Colocated runs: one process samples and trains by turns, on-policy to the token, and leaves what every run leaves."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from commands import Cli, processes_of
from trained_tokens import trained_samples

SHORT = [
    "trainer.steps=4",
    "trainer.batch_groups=2",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
    "rollout.episodes=16",
]


@pytest.mark.slow
def test_a_short_run_is_on_policy_to_the_token(cli: Cli) -> None:
    run = cli.run("run", "quickstart_colocated", *SHORT, "evaluation.every=2")
    folder = run.folder
    assert {path.stem for path in (folder / "logs").iterdir()} == {"dataflow", "forkserver", "unit-0", "trainer-agent"}
    assert {path.stem for path in (folder / "endpoints").iterdir()} >= {"trainer-agent", "colocated-0"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4
    assert [round["version"] for round in summary["heldout"]] == [0, 2, 4], "before, during and after training"
    assert processes_of(folder) == {}

    samples = list(trained_samples(folder))
    assert {sample.trained_at for sample in samples} == {0, 1, 2, 3}
    for sample in samples:
        assert (sample.version_T == sample.trained_at).all()
    assert json.loads(cli.run("audit", str(folder), "--json").output())["balanced"]
    assert (folder / "weights" / "agent" / "v00000004" / "manifest.json").is_file()
    assert "nothing to resume" in cli.run("resume", str(folder)).output()


@pytest.mark.slow
def test_two_ranks_play_and_train_together(cli: Cli) -> None:
    folder = cli.run("run", "quickstart_colocated", *SHORT, "trainer.steps=3", "trainer.ranks=2").folder
    assert "forking rank 1" in (folder / "logs" / "trainer-agent.log").read_text()
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        played = dict(ledger.execute("SELECT name, completed FROM nodes"))
    assert played.keys() == {"colocated-0", "colocated-1"}
    assert all(played.values()), played
    assert all((sample.version_T == sample.trained_at).all() for sample in trained_samples(folder))
    assert json.loads(cli.run("audit", str(folder), "--json").output())["balanced"]


@pytest.mark.slow
def test_episodes_that_training_cuts_go_on_under_the_next_weights(cli: Cli) -> None:
    """With a staleness bound there are more episodes under way than a batch needs."""
    run = cli.run("run", "quickstart_colocated", *SHORT, "trainer.steps=8", "dataflow.staleness=2")
    samples = list(trained_samples(run.folder))
    assert any(len(np.unique(sample.version_T)) > 1 for sample in samples), "no sample spans two versions"
    assert all(sample.trained_at - sample.version_T.min() <= 2 for sample in samples)
    assert all(sample.version_T.max() <= sample.trained_at for sample in samples)
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
