"""The balance report as text."""

from __future__ import annotations

import io

from rich.console import Console

from rillflow.cli.reports import balance_view
from rillflow.dataflow.balance import Balance, Counts, Look, Mark, NodeLook, Report, Step, make_report


def report(*nodes: NodeLook, steps: list[Step] | None = None) -> Report:
    mark = Mark(time=0.0, version=10, nodes={node.name: Counts() for node in nodes})
    look = Look(time=100.0, version=12, settled=11, entered=60, steps=steps or [], rounds=[], nodes=nodes)
    return make_report("agent", mark, look)


def node(name: str, *, gone: bool = False, version: int = 12, **counts: int) -> NodeLook:
    return NodeLook(name, 100.0, gone, 2, version, Counts(**counts))


def text(balance: Balance) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(balance_view(balance))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_report_in_words() -> None:
    full = report(
        node("n0", produced=90, accepted=80, consumed=50, completed=9),
        node("[red]n1", version=3, produced=30, accepted=3, failed=5),
        node("n2", gone=True),
        steps=[Step(11, 50.0, 6.0, 4.0)],
    )
    shown = text(Balance(latest=full, current=report()))
    assert "Balance report: agent, versions 10 to 12" in shown
    assert "1 without an evaluation: 10.00 s each, 4.00 s of it waiting; wait fraction 40%" in shown
    assert "4 GPUs, 0.30 samples/s each; 120 samples produced, 60 entered (50%), 50 consumed, 0 stale (0%)" in shown
    assert "produce/consume 1.20" in shown
    assert "grow 4 to 7 GPUs (+3); weights are being transferred" in shown
    assert "[red]n1" in shown, "names are text, not markup"
    rows = {line.split()[1]: line.split()[3] for line in shown.splitlines() if line.startswith("│")}
    assert rows == {"n0": "healthy", "[red]n1": "suspect", "n2": "gone"}
    assert "Balance since then" in shown


def test_what_is_unknown_is_said_so() -> None:
    shown = text(Balance(latest=None, current=report()))
    assert "the first window so far" in shown
    assert "wait fraction –" in shown
    assert "hold" in shown
