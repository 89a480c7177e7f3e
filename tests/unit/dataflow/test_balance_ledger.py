"""Balance reports over a real database: their times, their content, and reading them without a service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rillflow.dataflow.balance_ledger import BalanceGauges, Balances, read_balance
from rillflow.dataflow.ledger.database import Base, Database
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.ledger.shares import ENTERED
from rillflow.dataflow.rules import PolicyRules, Rules
from rillflow.errors import CorruptData, RunError
from rillflow.types.balance import Balance

POLICY, EVERY = "agent", 3


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class Run:
    """A ledger's database, with short words for what the ledger writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.version = 0
        self.open()

    def open(self) -> None:
        self.db = Database(self.path)
        rules = Rules(policies={POLICY: PolicyRules(POLICY)})
        self.balances = Balances(Base(self.db, rules, self.clock), POLICY, EVERY)
        with self.db.change():
            self.db.set_meta("format", FORMAT)
            self.balances.open()
        self.db.commit()

    def close(self) -> None:
        self.db.commit()
        self.db.close()

    def node(self, name: str = "n0", *, state: str = "healthy", stats: str = "{}", **counts: int) -> None:
        """Heard of now; `counts` are added to what it had."""
        with self.db.change():
            self.db.run(
                "INSERT INTO nodes (name, incarnation, state, seen, version) VALUES (?, 'i', ?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET state = excluded.state, seen = excluded.seen, "
                "version = excluded.version",
                (name, state, self.clock.now(), self.version),
            )
            self.db.run("UPDATE nodes SET stats = ? WHERE name = ?", (stats, name))
            for column, by in counts.items():
                self.db.run(f"UPDATE nodes SET {column} = {column} + ? WHERE name = ?", (by, name))

    def evaluate(self, seconds: float) -> None:
        with self.db.change():
            self.db.run(
                "INSERT INTO rounds (step, version, versions, state, planned, admitted_at, ended_at) "
                "VALUES (?, ?, '{}', 'ended', 1, ?, ?)",
                (self.version, self.version, self.clock.time, self.clock.time + seconds),
            )

    def step(self, seconds: float = 8.0, wait: float = 2.0, *, policy: str = POLICY, entered: int = 0) -> None:
        self.version += 1
        self.clock.time += seconds + wait
        with self.db.change():
            self.db.count(ENTERED, entered)
            self.db.run(
                "INSERT INTO steps (policy, version, parent, batch, samples, tokens, reward, staleness, step_seconds, "
                "wait_seconds, metrics, at) VALUES (?, ?, ?, 'b', 4, 40, 0.5, 0.0, ?, ?, '{}', ?)",
                (policy, self.version, self.version - 1, seconds, wait, self.clock.time),
            )
            self.balances.after_commit(policy)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(row["line"]) for row in self.db.all("SELECT line FROM events ORDER BY seq")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def test_a_report_comes_every_so_many_versions(run: Run) -> None:
    assert run.balances.latest() is None
    for _ in range(3 * EVERY - 1):
        run.node()
        run.step()
    assert [line["version"] for line in run.lines()] == [EVERY, 2 * EVERY]
    assert [line["window"]["since"] for line in run.lines()] == [0, EVERY]
    assert {line["event"] for line in run.lines()} == {"balance"}
    latest = run.balances.latest()
    assert latest is not None
    assert (latest.version, latest.window.steps, latest.window.wall_seconds) == (2 * EVERY, EVERY, 10.0 * EVERY)


def test_a_report_counts_what_was_added_since_the_last(run: Run) -> None:
    run.node(produced=30, accepted=25, consumed=20, completed=10)
    for _ in range(EVERY):
        run.step(entered=8)
    run.node(produced=10, accepted=10, consumed=9, stale=2, completed=5)
    for _ in range(EVERY):
        run.step(entered=4)
    first, second = (line["production"] for line in run.lines())
    assert (first["produced"], first["entered"], first["consumed"]) == (30, 8 * EVERY, 20)
    assert (second["produced"], second["entered"], second["consumed"], second["stale_skipped"]) == (
        10, 4 * EVERY, 9, 2,
    )  # fmt: skip
    assert run.lines()[1]["decision"]["branch"] == "grow"


def test_other_policies_make_no_report(run: Run) -> None:
    for _ in range(2 * EVERY):
        run.step(policy="critic")
    assert run.lines() == []


def test_versions_that_died_do_not_fill_a_window(run: Run) -> None:
    run.step()
    run.step()
    run.db.run("UPDATE steps SET state = 'orphaned'")
    run.step()
    run.step()
    assert run.lines() == []
    run.step()
    (line,) = run.lines()
    assert line["window"]["steps"] == EVERY


def test_the_window_under_way(run: Run) -> None:
    for _ in range(EVERY + 1):
        run.node(produced=4)
        run.step()
    run.clock.time += 5.0
    found = run.balances.now()
    assert found.latest is not None
    assert (found.latest.version, found.latest.production.produced) == (EVERY, 4 * EVERY)
    assert (found.current.version, found.current.window.steps) == (EVERY + 1, 1)
    assert (found.current.window.wall_seconds, found.current.production.produced) == (15.0, 4)


def test_evaluations_are_read_from_the_rounds(run: Run) -> None:
    run.step()
    run.evaluate(seconds=5.0)
    run.step(seconds=1.0, wait=9.0)
    run.step()
    window = run.lines()[0]["window"]
    assert (window["steps"], window["counted"], window["eval_seconds"]) == (3, 2, 5.0)
    assert window["wait_fraction"] == pytest.approx(0.2)


def test_gpus_are_what_nodes_declare(run: Run) -> None:
    for name, stats in {
        "none": "{}", "four": '{"gpus": 4.0}', "half": '{"gpus": 0.5}', "minus": '{"gpus": -3}',
        "nan": '{"gpus": NaN}', "huge": '{"gpus": 1e300}', "null": '{"gpus": null}',
    }.items():  # fmt: skip
        run.node(name, stats=stats)
    run.node("gone", state="gone", stats='{"gpus": 8}')
    found = run.balances.now().current
    gpus = {row.id: row.gpus for row in found.nodes}
    assert gpus == {"none": 1, "four": 4, "half": 1, "minus": 1, "nan": 1, "huge": 1, "null": 1, "gone": 8}
    assert found.production.gpus == 10


def test_a_restart_changes_nothing_and_its_pause_is_not_counted(run: Run) -> None:
    for _ in range(EVERY + 1):
        run.node(produced=4)
        run.step()
    run.node()
    before = run.balances.now()
    for _ in range(2):
        run.close()
        run.clock.time += 3600.0
        run.open()
    assert run.balances.now().latest == before.latest
    assert run.balances.now().current.window == before.current.window
    run.step()
    run.step()
    assert run.lines()[-1]["window"]["wall_seconds"] == 10.0 * EVERY


def test_a_report_is_as_durable_as_its_step(run: Run) -> None:
    run.step()
    run.step()
    run.db.commit()
    run.step()
    assert run.balances.latest() is not None
    run.db.close()  # killed before the commit
    run.open()
    assert run.lines() == []
    assert run.balances.latest() is None
    assert run.balances.now().current.window.steps == 2


# ---------------------------------------------------------------- without a service


def test_the_ledger_alone_tells_the_same(run: Run) -> None:
    for _ in range(EVERY + 1):
        run.step()
        run.node(produced=4)
    told = run.balances.now()
    run.close()
    assert read_balance([run.path], POLICY) == told
    run.open()


def test_ledgers_that_tell_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no ledger"):
        read_balance([tmp_path / "absent.sqlite"], POLICY)
    (tmp_path / "broken.sqlite").write_bytes(b"no database" * 200)
    with pytest.raises(CorruptData):
        read_balance([tmp_path / "broken.sqlite"], POLICY)
    db = Database(tmp_path / "other.sqlite")
    with db.change():
        db.set_meta("format", FORMAT + 1)
    db.commit()
    with pytest.raises(CorruptData, match=f"format {FORMAT + 1}"):
        read_balance([db.path], POLICY)
    with db.change():
        db.set_meta("format", FORMAT)
    db.commit()
    with pytest.raises(RunError, match="no balance yet"):
        read_balance([db.path], POLICY)
    with db.change():
        db.set_meta("balance.mark", {"time": "yesterday"})
    db.commit()
    db.close()
    with pytest.raises(CorruptData, match="damaged"):
        read_balance([db.path], POLICY)


# ---------------------------------------------------------------- Prometheus


def test_gauges_show_the_latest_report(run: Run) -> None:
    registry = CollectorRegistry()
    registry.register(BalanceGauges(run.balances))
    assert generate_latest(registry) == b""
    for _ in range(EVERY):
        run.node("n0", produced=4, accepted=3, completed=1)
        run.node("idle")
        run.step(entered=4)
    text = generate_latest(registry).decode()
    for line in (
        "rillflow_balance_wait_fraction 0.2",
        "rillflow_balance_gpus 2.0",
        "rillflow_balance_entered 12.0",
        "rillflow_balance_target 3.0",
        "rillflow_balance_delta 1.0",
        "rillflow_balance_weight_transfer 0.0",
        'rillflow_balance_node_accepted{node="n0"} 9.0',
        'rillflow_balance_node_state{node="n0",state="healthy"} 1.0',
    ):
        assert line in text.splitlines()
    assert "produce_consume_ratio" not in text
    assert 'accept_rate{node="idle"}' not in text


def test_the_answer_of_the_route_is_plain_data(run: Run) -> None:
    run.node("n0", produced=1)
    found = run.balances.now()
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    assert msgspec.convert(wire, Balance) == found
