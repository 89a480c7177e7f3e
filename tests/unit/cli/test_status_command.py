"""`rillflow status`, `top`, `nodes` and `retire`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rillflow.cli import status as module
from rillflow.cli.main import app
from rillflow.cli.status import nodes_table
from rillflow.config import load_recipe
from rillflow.config.supervised import load_fit
from rillflow.observe.run_view import RunReport, report_of, report_view, where_and_next
from rillflow.runtime.folder import RunFolder
from rillflow.types import Ack, NodeInfo, NodeList, RetireNode, Status

STARTED = 1_000.0
LIVE = Status(
    phase="running", reason="", steps=5, total_steps=24, versions={"agent": 5}, reward=0.5, samples_per_second=7.0,
    staleness=0.5, wait_fraction=0.25, counts={"trained": 80, "failures.timeout": 2}, evaluations=[], nodes=2,
    waits=["the trainer waits for a batch"],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of three steps and one evaluation, below `runs`."""
    made = RunFolder.create(load_recipe("quickstart"), tmp_path / "runs", now=STARTED)
    lines: list[dict[str, Any]] = [
        {"policy": "agent", "version": step + 1, "step": step + 1, "reward_mean": 0.2 * step} for step in range(3)
    ]
    lines.append({"event": "evaluation", "version": 2, "reward": 0.75, "failed": 0, "policy": "agent"})
    made.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_that_has_ended_is_read_from_its_folder(folder: RunFolder) -> None:
    folder.set_state("finished", "done")
    printed = told("status", str(folder.root))
    assert "finished (done)" in printed
    assert "3/24" in printed
    assert "0.400  ▁▅█" in printed
    assert "0.750, best 0.750" in printed
    found = json.loads(told("status", str(folder.root), "--json"))
    assert (found["state"], found["steps"], found["reward"], found["heldout"]) == ("finished", 3, 0.4, [0.75])
    assert (found["live"], found["what_to_do"]) == (None, "")


def seen(report: RunReport) -> str:
    console = Console(width=100, record=True)
    console.print(report_view(report))
    return console.export_text()


def test_a_live_run_is_what_its_service_says(folder: RunFolder) -> None:
    folder.set_state("running")
    folder.publish_endpoint("dashboard", "http://127.0.0.1:4000")
    report = report_of(folder, LIVE, STARTED + 3700)
    assert (report.state, report.steps, report.reward, report.failed) == ("running", 5, 0.5, {"timeout": 2})
    printed = seen(report)
    for said in ("5/24, 1:01:40", "25% of its time", "waits for a batch", "timeout 2"):
        assert said in printed
    assert f"\ndashboard: http://127.0.0.1:4000/?token={folder.token_of('reader')}" in where_and_next(report)


def test_killed_starting_and_new_runs_are_told_apart(folder: RunFolder) -> None:
    assert report_of(folder, None, STARTED).state == "new"
    folder.set_state("running")
    killed = report_of(folder, None, STARTED)
    assert killed.state == "killed"
    assert f"\n`rillflow resume {folder.root}` goes on where it was\n" in told("status", str(folder.root))
    with folder.locked():
        assert report_of(folder, None, STARTED).state == "starting"


def test_top_shows_all_runs_the_newest_first(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.set_state("finished", "done")
    fit = RunFolder.create(load_fit("sft"), folder.root.parent, now=STARTED + 60)
    fit.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    (folder.root.parent / "notes").mkdir()
    monkeypatch.chdir(folder.root.parent.parent)
    monkeypatch.setenv("COLUMNS", "120")
    lines = told("top").splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["new", "finished"]
    assert "1/" in lines[1]
    found = json.loads(told("top", "--json"))
    assert [one["name"] for one in found] == ["sft", "quickstart"]
    assert "finished (done)" in told("top", str(folder.root))


def node(name: str, **change: object) -> NodeInfo:
    values = {
        "state": "healthy", "active": "rollout", "leaving": False, "capacity": 8, "held": 3,
        "completed": 1, "failed": 0, "pace": 1.5, "throughput": 2.25, "seen": 0.5, "versions": {"main": 4}, "stats": {},
    }  # fmt: skip
    return NodeInfo(name=name, **values | change)  # type: ignore[arg-type]


def shown(*nodes: NodeInfo, heads: dict[str, int]) -> list[str]:
    console = Console(width=100, record=True)
    console.print(nodes_table(NodeList(nodes=list(nodes)), heads))
    return console.export_text().splitlines()


def test_the_table():
    lines = shown(
        node("a"),
        node("b", leaving=True, pace=None),
        node("c", state="left", leaving=True, versions={}),
        heads={"main": 6},
    )
    cells = [cell.strip() for cell in lines[3].split("│")[1:-1]]
    assert cells == ["a", "healthy", "rollout", "2", "3 of 8", "1.50", "2.25"]
    assert "leaving" in lines[4]
    assert "left" in lines[5]


def test_policies_that_differ():
    (line,) = [line for line in shown(node("a", versions={"x": 1, "y": 2}), heads={"x": 2, "y": 2}) if " a " in line]
    assert "x 1, y 0" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nodes"], "give a run folder, or --join URL"),
        (["nodes", "nowhere"], "is not a run folder"),
        (["retire", "only-one"], "name the run and the node"),
        (["retire", "run", "node", "--join", "http://h"], "name the run and the node"),
        (["rollout"], "give a run folder, or --join URL"),
        (["engine", "run", "--join", "http://h"], "give a run folder, or --join URL"),
    ],
)
def test_what_is_wrong_is_said(words, said):
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    assert said in result.output


def test_retire_asks_the_service(monkeypatch):
    asked: list[RetireNode] = []

    class Client:
        async def retire(self, ask: RetireNode, deadline: float) -> Ack:
            asked.append(ask)
            return Ack(accepted=True)

    monkeypatch.setattr(module, "call", lambda folder, url, token_file, ask: asyncio.run(ask(Client())))
    result = CliRunner().invoke(app, ["retire", "far", "--join", "http://h", "--drain", "5"])
    assert result.exit_code == 0
    assert asked == [RetireNode(node="far", drain=5.0)]
    assert "far gets no more tasks and leaves within 5 s" in result.output
