"""`rillflow tags` on a run folder whose processes answer, or do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rillflow.cli import workers as module
from rillflow.cli.main import app
from rillflow.cli.workers import Seen, view
from rillflow.config import load_recipe
from rillflow.resources.workers import Roofline, Worker
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeInfo

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart", ["rollout.nodes=2"]), tmp_path)


def told(*arguments: str | Path, code: int = 0) -> str:
    result = runner.invoke(app, ["tags", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_workers_of_a_run_that_does_not_run(folder: RunFolder) -> None:
    shown = json.loads(told(folder.root, "--json"))
    assert not shown["running"]
    assert [(one["name"], one["tags"], one["state"]) for one in shown["workers"]] == [
        ("trainer-agent", ["train"], "spare"), ("rollout-0", ["rollout"], "spare"), ("rollout-1", ["rollout"], "spare"),
    ]  # fmt: skip
    assert "no dataflow service answers" in told(folder.root)


def test_tags_are_set_changed_and_refused(folder: RunFolder) -> None:
    told(folder.root, "trainer-agent", "rollout,train")
    told(folder.root, "trainer-agent", "-rollout")
    told(folder.root, "rollout-0", "+train", "-rollout")
    tags = {worker.name: sorted(worker.tags) for worker in folder.workers.read()}
    assert tags == {"trainer-agent": ["train"], "rollout-0": ["train"], "rollout-1": ["rollout"]}
    assert "no worker rolls out" in told(folder.root, "rollout-1", "none", code=2)
    assert "unknown tag 'rolout'" in told(folder.root, "rollout-1", "rolout", code=2)
    assert "unknown worker 'rollout-7'" in told(folder.root, "rollout-7", code=2)
    only = json.loads(told(folder.root, "rollout-1", "--json"))["workers"]
    assert [one["name"] for one in only] == ["rollout-1"]


def test_this_machine_is_measured_when_asked(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.cli.workers.measure_apart", lambda threads: Roofline(2.0, 500.0))
    shown = json.loads(told(folder.root, "--measure", "--json"))["workers"]
    assert {(one["tflops"], one["bandwidth"], one["priority"]) for one in shown} == {(2.0, 500.0, 2.0)}


def node(name: str, **changes: Any) -> NodeInfo:
    values: dict[str, Any] = {
        "name": name, "state": "healthy", "active": "rollout", "leaving": False, "capacity": 1, "held": 0,
        "completed": 0, "failed": 0, "pace": None, "throughput": 0.0, "seen": 0.0, "versions": {}, "stats": {},
    }  # fmt: skip
    return NodeInfo(**(values | changes))


def worker(name: str, *tags: Any, **changes: Any) -> Worker:
    return Worker(name=name, tags=frozenset(tags), policy="agent", **changes)


PLAYS = worker("rollout-0", "rollout", process="rollout-0")
TRAINS = worker("trainer-agent", "train", process="trainer-agent", rank=0)
BOTH = worker("trainer-agent", "rollout", "train", process="trainer-agent", rank=1)
RESTS = worker("rollout-1")


@pytest.mark.parametrize(
    ("one", "nodes", "expected"),
    [
        (PLAYS, [node("rollout-0")], ("rollout", "up")),
        (PLAYS, [node("rollout-0", leaving=True)], ("rollout", "leaving")),
        (PLAYS, [node("rollout-0", state="gone")], (None, "gone")),
        (PLAYS, [], (None, "starting")),
        (worker("rollout-0", "rollout", lost=True), [node("rollout-0")], (None, "lost")),
        (TRAINS, [], ("train", "up")),
        (BOTH, [node("colocated-1", active="rollout")], ("rollout", "up")),
        (BOTH, [node("colocated-1", active="train")], ("train", "up")),
        (BOTH, [], ("train", "up")),
        (RESTS, [], (None, "spare")),
        (RESTS, [node("rollout-1")], ("rollout", "leaving")),
        (worker("a", "train", process="trainer-other", rank=0), [], (None, "starting")),
    ],
)
def test_what_a_worker_does_is_what_its_process_says(
    one: Worker, nodes: list[NodeInfo], expected: tuple[str | None, str]
) -> None:
    seen = Seen({info.name: info for info in nodes}, frozenset({"trainer-agent"}))
    shown = view(one, seen)
    assert (shown.active, shown.state) == expected


def test_the_table_names_ranks_and_priorities(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "look", lambda folder: Seen({}, frozenset({"trainer-agent"})))
    folder.workers.prepare(folder.recipe)
    folder.workers.change(lambda workers: [worker("trainer-agent", "train", process="trainer-agent", rank=0, tflops=4.0,
                                                  bandwidth=500.0), *workers[1:]])  # fmt: skip
    shown = told(folder.root)
    assert "trainer-agent, rank 0" in shown
    assert " 4 " in shown
