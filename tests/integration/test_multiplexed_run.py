"""Multiplexed runs: a worker that rolls out and trains beside one that only rolls out; nothing is lost or too old."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from commands import Cli, processes_of
from rillflow.storage.spans import read_spans
from trained_tokens import trained_samples

SHORT = [
    "trainer.steps=8",
    "trainer.batch_groups=2",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
    "rollout.episodes=16",
]


def check(cli: Cli, folder: Path, staleness: int) -> None:
    """Check the properties of every such run."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        played = dict(ledger.execute("SELECT name, completed FROM nodes"))
    assert played.keys() == {"colocated-0", "rollout-0"}
    assert all(played.values()), played
    samples = list(trained_samples(folder))
    assert {sample.trained_at for sample in samples} == set(range(8))
    for sample in samples:
        assert sample.version_T.max() <= sample.trained_at
        assert sample.trained_at - sample.version_T.min() <= staleness
    assert json.loads(cli.run("audit", str(folder), "--json").output())["balanced"]
    assert json.loads((folder / "weights" / "agent" / "head.json").read_text())["head"] == 8, "others pull it there"
    assert processes_of(folder) == {}


@pytest.mark.slow
def test_a_trainer_rolls_out_while_it_waits_and_others_while_it_trains(cli: Cli) -> None:
    folder = cli.run("run", "pipeline_multiplexed", *SHORT).folder
    check(cli, folder, staleness=2)
    spans = read_spans(folder)
    assert spans.keys() == {"trainer-agent", "rollout-0"}
    states = {worker: {span.state for span in of} for worker, of in spans.items()}
    assert states["trainer-agent"] >= {"train", "switch", "rollout"}
    assert "rollout" in states["rollout-0"]
    assert "train" not in states["rollout-0"]
    trained = [span for span in spans["trainer-agent"] if span.state == "train"]
    rolled = [span for span in spans["rollout-0"] if span.state == "rollout"]
    assert any(one.begin < two.end and two.begin < one.end for one in trained for two in rolled), "none at once"
    assert (folder / "timeline.png").is_file()
    shares = json.loads(cli.run("timeline", str(folder), "--json").output())["workers"]
    assert shares.keys() == spans.keys()


@pytest.mark.slow
def test_preempted_answers_move_to_engine_processes_and_memory_is_handed_over(cli: Cli) -> None:
    folder = cli.run(
        "run", "pipeline_multiplexed", *SHORT, "rollout.engines=1", "resources.on_preempt=move",
        "resources.memory=release",
    ).folder  # fmt: skip
    check(cli, folder, staleness=2)
    assert read_spans(folder).keys() == {"trainer-agent", "engine-0"}, "a node without an engine computes nothing"
