"""`rillflow balance` on a live service, on a ledger that was left, and where there is neither."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.reports import find_balance, print_balance
from rillflow.config import load_recipe
from rillflow.contracts import SystemClock
from rillflow.dataflow.balance import Balance
from rillflow.dataflow.balance_ledger import Balances
from rillflow.dataflow.ledger.database import Base, Database
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.rules import Rules
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder
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
        return answer

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
