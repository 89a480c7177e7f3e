"""Planners' decisions are read from the storage units, else from the trajectories that the run keeps."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kept_trajectories import trajectory
from rillflow.agents.agentflow.labels import collect
from rillflow.agents.agentflow.models import ANSWER, ROLE, Decision
from rillflow.config.rollout import SourceConfig
from rillflow.dataflow.ledger.schema import TABLES
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import FILE, KINDS, Trajectory

DECISION = Decision(thought="I know.", action=ANSWER, action_input="42").written()


def ledger(folder: Path, tasks: int) -> Any:
    """Write a run that has played tasks of one prompt, whose rows are in no unit any more; returns its recipe."""
    (folder / "prompts.jsonl").write_text(json.dumps({"id": "p0", "question": "What is it?"}) + "\n")
    with sqlite3.connect(folder / "ledger.sqlite") as database:
        database.executescript(TABLES)
        for lane in ("train", "eval"):
            group = f"{lane}0"
            database.execute(
                "INSERT INTO groups (id, lane, round, ord, prompt, planned, state, admitted_at) "
                "VALUES (?, ?, 0, 0, 'p0', ?, 'open', 0)",
                (group, lane, tasks),
            )
            for place in range(tasks):
                database.execute(
                    "INSERT INTO tasks (grp, place, seed, state, reward) VALUES (?, ?, 0, 'done', 1.0)",
                    (group, place),
                )
                database.execute(
                    "INSERT INTO samples VALUES (?, ?, 0, 'p', 'unit', 0, 0, 8, 4, 4, 0, 0, 1.0, 0, 1, '', 0)",
                    (group, place),
                )
    source = SourceConfig(path=str(folder / "prompts.jsonl"))
    data = SimpleNamespace(prompts=[source], shuffle=False)
    return SimpleNamespace(data=data, dataflow=SimpleNamespace(ledgers=1), seed=0)


def planned(name: str, **info: Any) -> Trajectory:
    said = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": DECISION}]
    path = {"policy": "p", "agent": ROLE, "messages": said}
    return replace(trajectory(name, **info), paths=[path])


def test_what_the_units_have_dropped_is_read_from_kept_trajectories(tmp_path: Path) -> None:
    recipe = ledger(tmp_path, 3)
    assert (collect(recipe, tmp_path).gone, collect(recipe, tmp_path).episodes) == (3, [])
    store = TrajectoryStore(tmp_path / FILE, Bounds(bytes=4 << 20, most=dict.fromkeys(KINDS, 10)))
    store.add(planned("train0.1"))
    store.add(planned("eval0.0", lane="evaluation", kept="evaluation"))
    store.add(planned("train0.2-1", status="failed", kept="failure"))
    store.close()
    found = collect(recipe, tmp_path)
    assert (found.gone, found.empty) == (2, 0)
    assert [(one.task, one.question, one.outcome) for one in found.episodes] == [("train0.1", "What is it?", 1.0)]
