"""A real run whose maintainer starts a node and stops it again, by real reports; and one that is killed meanwhile."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import Cli, Started, all_processes_of, processes_of, steps_of, wait_until

# Which side is slow stands in a file, so that a test says when that changes. The seconds stand for the work of larger
# models: two cores cannot show one.
PACED = """
import asyncio
import json
import os
import time
from pathlib import Path

from rillflow.examples.stockroom import play as play_stockroom
from rillflow.trainer.graph import function


def seconds(side):
    return json.loads(Path(os.environ["PACE_FILE"]).read_text())[side]


async def play(episode):
    await asyncio.sleep(seconds("rollout"))
    return await play_stockroom(episode)


@function("slowed", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"])
def slowed(step, data):
    time.sleep(seconds("train"))
    return {"reward_R": data["reward_R"]}
"""
RECIPE = """
extends: stockroom
name: maintained
workflow: paced.py:play
data: {heldout: null}
dataflow: {group_size: 2, staleness: 2, balance_every: 3, filters: []}
trainer: {steps: 60, batch_groups: 2, nodes: [paced.py:slowed]}
rollout: {episodes: 4}
resources:
  scaling: {enabled: true, least: 1, most: 2, cooldown: 3, drain: 20}
"""


class Maintained:
    """The run, and what its maintainer has written down."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pace = cli.cwd / "pace.json"
        self.pace(rollout=1.0, train=0.0)
        monkeypatch.setenv("PACE_FILE", str(self._pace))
        (cli.cwd / "paced.py").write_text(PACED)
        (cli.cwd / "maintained.yaml").write_text(RECIPE)
        self.run: Started = cli.start("run", "maintained.yaml")
        wait_until(lambda: any(self.run.runs.iterdir()), "the run folder", 600)
        self.folder = self.run.folder

    def pace(self, *, rollout: float, train: float) -> None:
        written = self._pace.with_suffix(".new")
        written.write_text(json.dumps({"rollout": rollout, "train": train}))
        os.replace(written, self._pace)

    def lines(self) -> list[dict[str, Any]]:
        log = self.folder / "maintainer.jsonl"
        return [json.loads(line) for line in log.read_bytes().splitlines()] if log.is_file() else []

    def wait_for(self, action: str, seconds: float = 180.0) -> dict[str, Any]:
        def seen() -> list[dict[str, Any]]:
            assert self.run.process.poll() is None, self.run.output()[-3000:]
            return [line for line in self.lines() if line["action"] == action]

        wait_until(seen, f"the maintainer's line {action}", seconds)
        return seen()[0]

    def kept(self) -> dict[str, psutil.Process]:
        """The processes that the maintainer has started, by their names."""
        path = self.folder / "maintainer-nodes.json"
        nodes = json.loads(path.read_bytes()) if path.is_file() else {}
        return {name: psutil.Process(node["pid"]) for name, node in nodes.items() if node["pid"]}

    def samples_of(self, node: str) -> int:
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as ledger:
            return int(ledger.execute("SELECT accepted FROM nodes WHERE name = ?", (node,)).fetchone()[0])


def has_ended(process: psutil.Process) -> bool:
    """Return whether it has ended; its exit code may not have been collected, because its parent was killed."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_node_is_started_and_stopped_by_reports(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Maintained(cli, monkeypatch)
    grown = run.wait_for("grow")
    assert (grown["branch"], grown["size"], grown["wanted"]) == ("grow", 1, 2)
    joined = run.wait_for("joined")
    assert joined["nodes"] == ["auto-0"]
    node = run.kept()["auto-0"]

    # The maintainer is killed; its node goes on, and the next maintainer knows it.
    first = processes_of(run.folder)["maintain"]
    first.kill()
    wait_until(lambda: _another(run.folder, first.pid), "the next maintainer", 600)
    assert not has_ended(node)

    wait_until(lambda: run.samples_of("auto-0") > 0, "samples of the new node", 600)
    run.pace(rollout=0.0, train=1.5)
    shrunk = run.wait_for("shrink")
    assert shrunk["nodes"] == ["auto-0"]
    stopped = run.wait_for("stopped")
    assert stopped["nodes"] == ["auto-0"]
    wait_until(lambda: has_ended(node), "the node's process to end")
    assert processes_of(run.folder)["rollout"].is_running(), "the run's own node stays"

    run.pace(rollout=0.0, train=0.0)
    assert run.run.wait(600) == 0, run.run.output()[-3000:]
    assert steps_of(run.folder) == 60
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
    decided = [line["version"] for line in run.lines() if line["action"] in ("grow", "shrink", "hold")]
    assert len(decided) == len(set(decided)), "one decision for a report"
    assert list(all_processes_of(run.folder)) == []
    assert run.kept() == {}


def _another(folder: Path, pid: int) -> bool:
    found = processes_of(folder).get("maintain")
    return found is not None and found.pid != pid


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_no_node_behind(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Maintained(cli, monkeypatch)
    run.wait_for("start")
    wait_until(lambda: "auto-0" in run.kept(), "the new node's process")
    node = run.kept()["auto-0"]
    run.run.interrupt()
    assert run.run.wait(60) == 130
    wait_until(lambda: has_ended(node), "the end of the node", 120)
