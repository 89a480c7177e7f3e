"""`rillflow nodes` and `rillflow retire`."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rillflow.cli import status as module
from rillflow.cli.main import app
from rillflow.cli.status import nodes_table
from rillflow.types import Ack, NodeInfo, NodeList, RetireNode


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
