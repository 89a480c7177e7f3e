"""Nodes join a run by its URL, leave it and are asked to stop, while it trains; and `bench.elastic` in small."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.elastic import OVERRIDES, Run
from commands import Cli, Warm
from forked_command import Program, fork_python
from needs import ROOT
from rillflow.dataflow.audit import audit

pytestmark = pytest.mark.slow

STEP = 0.02  # seconds of a decode step: device time that is emulated, as in the bench


class ForkedRun(Run):
    """A run whose processes are forked from one that has imported torch."""

    def __init__(self, parent: Path, warm: Warm) -> None:
        super().__init__(parent, (*OVERRIDES, "trainer.batch_groups=2"))
        self._warm = warm

    def _process(self, name: str, words: list[str], environment: dict[str, str] | None = None) -> Program:
        return fork_python(self._warm.path(), words, {**os.environ, **(environment or {})}, self.folder.log(name), ROOT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Run]:
    """A run without nodes, which the tests of this file share; the last one stops it."""
    run = ForkedRun(tmp_path_factory.mktemp("elastic"), warm)
    try:
        run.start()
        yield run
    finally:
        run.close()


def held(run: Run, name: str) -> int:
    return next((node.held for node in run.told().nodes if node.name == name), 0)


def done(run: Run, name: str) -> int:
    return next((node.completed for node in run.told().nodes if node.name == name), 0)


def test_a_second_signal_ends_a_node_at_once(run: Run) -> None:
    run.join("stuck", 2.0)  # its episodes take a minute
    run.wait_for(lambda: held(run, "stuck") > 0, "the node to play")
    time.sleep(1.0)
    run.nodes["stuck"].send_signal(signal.SIGTERM)
    run.wait_for(lambda: any(node.leaving for node in run.told().nodes), "the node to leave")
    run.nodes["stuck"].send_signal(signal.SIGTERM)
    assert run.code("stuck", 20) == 128 + signal.SIGTERM


def test_nodes_come_and_go_while_the_trainer_trains(run: Run, cli: Cli) -> None:
    run.join("one", STEP)
    run.wait_for(lambda: run.steps() > 0, "a first step")
    trainer = run.services["trainer"].pid
    # Three more, one of them slower; weights and samples travel over HTTP alone.
    for name, step in (("two", STEP), ("three", STEP), ("slow", 4 * STEP)):
        run.join(name, step)
    run.wait_for(lambda: run.playing(["one", "two", "three", "slow"]), "four nodes to play")
    steps = run.steps()
    # One is retired by the command, one is asked to stop, one dies.
    cli.run("retire", str(run.folder.root), "one", "--drain", "20")
    run.nodes["two"].send_signal(signal.SIGTERM)
    assert run.code("one") == 0
    assert run.code("two") == 0
    run.wait_for(lambda: held(run, "three") > 0, "the node to hold something")
    run.nodes["three"].kill()
    run.wait_for(lambda: run.playing(["slow"]), "the dead node to be noticed")
    assert held(run, "three") == 0
    # The rest of the run goes on, and a node with an old name is a new one.
    run.join("one", STEP)
    before = done(run, "one")
    run.wait_for(lambda: done(run, "one") > before, "the name to play again")
    run.wait_for(lambda: run.steps() > steps + 2, "the trainer to go on")
    assert run.services["trainer"].poll() is None
    assert run.services["trainer"].pid == trainer
    table = cli.run("nodes", str(run.folder.root)).output()
    assert "slow" in table
    seen = json.loads(cli.run("status", str(run.folder.root), "--json").output())
    assert (seen["state"], seen["live"]["nodes"] > 0, seen["steps"] > steps) == ("running", True, True)
    run.stop()
    assert run.code("slow") == run.code("one") == 0
    states = {cause for cause, _ in run.count("SELECT cause, 1 FROM attempts WHERE state = 'returned'")}
    assert states <= {"node_left", "node_gone", "stopped", "stale"}
    assert run.count("SELECT state, count(*) FROM attempts WHERE state = 'failed' GROUP BY state") == []
    run.close()
    assert audit(run.folder.ledger).balanced


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--join", "http://127.0.0.1:9"], "no token of the run is known"),
        (["--join", "nowhere", "--token-file", "token"], "is not the URL of a run"),
        ([], "give a run folder, or --join URL"),
    ],
)
def test_what_cannot_work_is_one_clear_error(cli: Cli, monkeypatch: pytest.MonkeyPatch, words, said) -> None:
    monkeypatch.delenv("RILLFLOW_TOKEN", raising=False)
    (cli.cwd / "token").write_text("secret")
    started = cli.start("rollout", *words)
    assert started.wait(60) == 3
    assert said in started.output()
    assert "Traceback" not in started.output()
