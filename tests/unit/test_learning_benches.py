"""The learning benches read the ledger of today, and stop when their time is up."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench import agentflow, solver_verifier
from bench.arms import NotMade, Runs, asked, at_once, episodes, held_out
from rillflow.dataflow.ledger.schema import TABLES


def ledger(run: Path) -> None:
    """Write a run with an evaluation before and after training and two training episodes."""
    run.mkdir(parents=True)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
        database.executescript(TABLES)
        groups = [("e0", "eval", 0), ("e1", "eval", 1), ("t", "train", 0)]
        for group, lane, number in groups:
            database.execute(
                "INSERT INTO groups (id, lane, round, ord, prompt, planned, state, admitted_at) "
                "VALUES (?, ?, ?, 0, 'p', 2, 'ended', 0)",
                (group, lane, number),
            )
            for place in range(2):
                reward = float(group == "e1" and place == 0)
                database.execute(
                    "INSERT INTO tasks (grp, place, seed, state, reward) VALUES (?, ?, 0, 'done', ?)",
                    (group, place, reward),
                )
                for n, agent in enumerate(("solver", "verifier")):
                    database.execute(
                        "INSERT INTO samples VALUES (?, ?, ?, ?, 'unit', 0, 0, 8, 4, 4, 0, 0, ?, 0, 1, ?, 0)",
                        (group, place, n, agent, reward if agent == "solver" else 1.0, agent),
                    )
        for number in range(2):
            database.execute(
                "INSERT INTO rounds (id, step, version, state, versions, planned, admitted_at) "
                "VALUES (?, ?, ?, 'ended', '{}', 2, 0)",
                (number, number, number),
            )
        database.commit()


def test_rewards_and_episodes_are_read_from_the_ledger(tmp_path: Path) -> None:
    ledger(tmp_path / "run")
    before, after = held_out(tmp_path / "run")
    assert (before.value, after.value) == (0.0, 0.5)
    assert episodes(tmp_path / "run") == 2
    rows = asked(tmp_path / "run", solver_verifier._VERDICTS, 1)
    assert sorted(rows) == [("p", 0.0, 1.0, 0.0), ("p", 1.0, 1.0, 1.0)]


def test_the_start_of_an_arm_is_the_end_of_the_first_round(tmp_path: Path) -> None:
    for part in ("first-round-0", "outcome-only-0"):
        run = tmp_path / part / "agentflow-1"
        ledger(run)
        (run / "state.json").write_text('{"state": "finished"}')
        with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
            database.execute("INSERT INTO steps VALUES ('planner', 1, 0, 'live', 'b', 8, 8, 0, 0, 0, 0, '{}', 0)")
            database.commit()
    (tmp_path / "first-round-0-model").mkdir()
    runs = Runs(tmp_path, 1, seconds=0)
    bench = agentflow.Bench(runs, "", size=agentflow.Size(), warm=tmp_path, threads=1, few=False)
    assert bench.first_round(0).before.value == 0.0
    arm = bench.outcome_only(0)
    assert (arm.before.value, arm.after.value, arm.calls) == (0.5, 0.5, 8)


def test_without_time_no_command_is_started(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 1, seconds=0)
    with pytest.raises(NotMade, match="fit sft"):
        runs.made("warm", "fit", "sft")
    (tmp_path / "labels").write_text("there")
    found = at_once([lambda: runs.written("labels", "label"), lambda: runs.written("others", "label", "{}")])
    assert found == [tmp_path / "labels", None]


def test_a_constant_model_has_a_head_of_zeros_and_is_else_the_same(tmp_path: Path) -> None:
    model = tmp_path / "prm-judge-0" / "fit-1" / "model"
    model.mkdir(parents=True)
    (model.parent / "state.json").write_text('{"state": "finished"}')
    (tmp_path / "prm-judge-0-heldout.jsonl").touch()
    weights = {agentflow.HEAD: np.ones((1, 4), np.float32), "norm.weight": np.ones(4, np.float32)}
    save_file(weights, model / "model.safetensors")
    for part in ("first-round-0", "outcome-only-0"):
        (tmp_path / part / "agentflow-1").mkdir(parents=True)
        (tmp_path / part / "agentflow-1" / "state.json").write_text('{"state": "finished"}')
    (tmp_path / "first-round-0-model").mkdir()
    runs = Runs(tmp_path, 1, seconds=0)
    bench = agentflow.Bench(runs, "", size=agentflow.Size(), warm=tmp_path, threads=1, few=False)
    made = load_file(bench._flat(0, agentflow.ARMS["constant scores"]) / "model.safetensors")
    assert not made[agentflow.HEAD].any()
    assert made["norm.weight"].all()


def test_arms_share_a_model_only_if_their_labels_are_the_same() -> None:
    arms = agentflow.ARMS
    assert arms["constant scores"].model == arms[agentflow.PRO].model
    apart = {arms[name].model for name in (agentflow.PRO, "outcome labels", "no results", "unbalanced judge")}
    assert len(apart) == 4
