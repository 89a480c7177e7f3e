"""Colocated runs: one process samples and trains by turns, on-policy to the token, and leaves what every run leaves."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from commands import Cli, processes_of, steps_of, wait_until
from trained_tokens import trained_samples

SHORT = [
    "trainer.steps=4",
    "trainer.batch_groups=2",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
    "rollout.episodes=16",
]


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


@pytest.mark.slow
def test_ctrl_c_stops_it_and_it_goes_on(cli: Cli) -> None:
    run = cli.start("run", "quickstart_colocated", *SHORT, "trainer.steps=40")
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 2, "two steps", 120)
    run.interrupt()
    assert run.wait(15.0) == 130
    assert processes_of(run.folder) == {}
    resumed = cli.start("resume", str(run.folder))
    wait_until(lambda: steps_of(run.folder) >= 10, "more steps", 120)
    resumed.interrupt()
    assert resumed.wait(15.0) == 130
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]


def final_weights(folder: Path) -> bytes:
    weights = folder / "weights" / "agent"
    head = json.loads((weights / "head.json").read_text())["head"]
    return (weights / f"v{head:08d}" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_deterministic_it_resumes_bit_identically(cli: Cli) -> None:
    """And gives the very weights of the asynchronous run: who samples when changes nothing."""
    settings = [
        *SHORT, "runtime.deterministic=true", "dataflow.staleness=0", "dataflow.group_size=4", "trainer.steps=6",
        "trainer.checkpoint_every=2",
    ]  # fmt: skip
    expected = final_weights(cli.run("run", "quickstart", *settings).folder)
    run = cli.start("run", "quickstart_colocated", *settings)
    wait_until(lambda: any("colocated" in path.name for path in run.runs.iterdir()), "the run folder")
    folder = next(path for path in run.runs.iterdir() if "colocated" in path.name)
    wait_until(lambda: steps_of(folder) >= 3, "three steps", 180)
    victims = processes_of(folder)
    run.process.kill()
    for victim in victims.values():
        victim.kill()
    run.wait(10)
    wait_until(lambda: processes_of(folder) == {}, "all processes to be gone", 10)
    assert steps_of(folder) < 6, "killed too late to show anything"
    cli.run("resume", str(folder))
    assert final_weights(folder) == expected
    cli.run("audit", str(folder))
