"""`rillflow balance`: of a live run, of a ledger, and as people read it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rillflow.cli.reports import balance_view, find_balance, print_balance
from rillflow.config import load_recipe
from rillflow.contracts import SystemClock
from rillflow.dataflow.balance import Counts, Look, Mark, NodeLook, Step, make_report
from rillflow.dataflow.balance_ledger import Balances
from rillflow.dataflow.ledger.database import Base, Database
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.rules import Rules
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder
from rillflow.types.balance import Balance, LedgerBalances, Report
from rillflow.types.routes import Dataflow
from rillflow.wire import Service
from rillflow.wire.blocking import LoopThread


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path)


def leave_ledger(folder: RunFolder) -> Balance:
    """Write a ledger as a run leaves it; returns its last balance."""
    db = Database(folder.ledger)
    recipe = folder.recipe
    balances = Balances(Base(db, Rules.of(recipe), SystemClock()), recipe.policy, recipe.dataflow.balance_every)
    with db.change():
        db.set_meta("format", FORMAT)
        balances.open()
        db.run("INSERT INTO nodes (name, incarnation, state, seen) VALUES ('rollout-0', 'i', 'healthy', 1.0)")
    db.commit()
    told = balances.now()
    db.close()
    return told


@contextmanager
def served(folder: RunFolder, token: str, answer: object) -> Iterator[None]:
    """Something that answers GET /balance where the run's service was."""
    thread = LoopThread("service")
    service = Service("dataflow", token)

    async def balance() -> Any:
        return LedgerBalances(ledgers=[answer]) if isinstance(answer, Balance) else answer

    service.on(Dataflow.balance, balance)
    try:
        folder.publish_endpoint("dataflow", thread.run(service.start(), 10.0))
        yield
        thread.run(service.stop(), 10.0)
    finally:
        thread.close()


def test_a_live_service_tells(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    told = leave_ledger(folder)
    folder.ledger.unlink()
    with served(folder, folder.token, told):
        assert find_balance(folder) == (told, True)
        print_balance(folder, as_json=False)
    shown = capsys.readouterr().out
    assert "rollout-0" in shown
    assert "no dataflow service" not in shown


def test_without_a_service_the_ledger_tells(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    told = leave_ledger(folder)
    balance, live = find_balance(folder)
    assert not live
    assert balance.current.nodes == told.current.nodes
    print_balance(folder, as_json=False)
    assert "no dataflow service answers" in capsys.readouterr().out


def test_json_is_the_whole_balance(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    leave_ledger(folder)
    print_balance(folder, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["latest"] is None
    assert shown["current"]["decision"] == {"branch": "hold", "target": 1, "delta": 0, "weight_transfer": True}


def test_somebody_else_listens_where_the_service_was(folder: RunFolder) -> None:
    leave_ledger(folder)
    with served(folder, "another token", {}):
        assert find_balance(folder)[1] is False
    with served(folder, folder.token, {"something": "else"}):
        assert find_balance(folder)[1] is False


def test_a_service_that_is_gone(folder: RunFolder) -> None:
    leave_ledger(folder)
    with served(folder, folder.token, {}):
        pass
    assert find_balance(folder)[1] is False


def test_a_run_that_was_never_started(folder: RunFolder) -> None:
    with pytest.raises(RunError, match="there is no ledger"):
        find_balance(folder)


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
