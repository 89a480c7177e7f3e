"""The quickstart's parts on a real Ray cluster of several nodes: placed, lost, added, killed; nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import Cli, Started, all_processes_of, steps_of, wait_until
from ray_nodes import Nodes, ray_cluster

pytestmark = [pytest.mark.needs("ray"), pytest.mark.slow]

SHORT = [
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
    "evaluation.every=0",
    "rollout.episodes=16",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with ray_cluster() as nodes:
        yield nodes


def start(cli: Cli, cluster: Nodes, *overrides: str) -> Started:
    run = cli.start("run", "stockroom", *SHORT, *overrides, "--runtime", "ray", "--address", cluster.address)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder", 600)
    return run


def check_end(cli: Cli, run: Started, steps: int) -> None:
    assert run.wait(600) == 0, run.output()[-4000:]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == steps
    assert json.loads((run.folder / "state.json").read_text())["state"] == "finished"
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]
    assert list(all_processes_of(run.folder)) == []
    assert nodes_of(run.folder) == []


def nodes_of(folder: Path) -> list[psutil.Process]:
    """Rollout nodes do not name the folder, but the service of its run."""
    endpoint = folder / "endpoints" / "dataflow.json"
    url = json.loads(endpoint.read_text())["url"] if endpoint.is_file() else "none"
    return [p for p in psutil.process_iter(["cmdline"]) if url in (p.info["cmdline"] or []) and p.is_running()]


def rank(folder: Path, number: int) -> psutil.Process:
    return next(
        process
        for role, process in all_processes_of(folder)
        if role == "trainer" and ["--rank", str(number)] == process.info["cmdline"][-4:-2]
    )


def maintain(folder: Path, *action: str) -> Any:
    """As a maintainer does that was started a moment ago, and ends right after."""
    script = Path(__file__).parents[1] / "ray_executor.py"
    done = subprocess.run(
        [sys.executable, script, folder, *action], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_maintainers_find_their_nodes_and_a_stopped_run_leaves_nothing(cli: Cli, cluster: Nodes) -> None:
    cluster.add("both", rollout=2, train=1)
    run = start(cli, cluster, "trainer.steps=5000")
    wait_until(lambda: steps_of(run.folder) >= 1, "the first step", 600)
    maintain(run.folder, "start", "auto-1")
    wait_until(lambda: len(nodes_of(run.folder)) == 2, "the maintainer's node", 600)
    assert maintain(run.folder, "nodes") == {"auto-1": True}

    token = json.loads((run.folder / "run.json").read_text())["token"]
    for process in psutil.process_iter(["cmdline"]):
        assert token not in " ".join(process.info["cmdline"] or [])

    maintain(run.folder, "stop", "auto-1")
    assert len(nodes_of(run.folder)) == 1
    run.interrupt()
    assert run.wait(60) == 130
    assert "rillflow resume" in run.output()
    wait_until(lambda: not nodes_of(run.folder) and not list(all_processes_of(run.folder)), "all to end", 120)
    cluster.remove("both")


def test_what_is_lost_during_a_run_is_placed_again(cli: Cli, cluster: Nodes) -> None:
    """One run of two ranks. First there is room for one rollout node of two; then an actor of one rank is killed; then
    a machine comes, and the one where everything was goes down."""
    cluster.add("first", rollout=1, train=2)
    run = start(cli, cluster, "trainer.steps=10", "trainer.ranks=2", "rollout.nodes=2")
    wait_until(lambda: steps_of(run.folder) >= 3, "three steps", 600)
    assert len(nodes_of(run.folder)) == 1
    before = [rank(run.folder, number) for number in (0, 1)]
    actor = before[1].parent()
    assert actor is not None
    actor.kill()
    wait_until(lambda: not any(process.is_running() for process in before), "both ranks end", 120)
    wait_until(lambda: "all of trainer-agent end, to restart" in run.output(), "the run to say so")

    cluster.add("second", rollout=2, train=2)
    wait_until(lambda: len(nodes_of(run.folder)) == 2, "the node that waited for room", 600)
    cluster.remove("first")
    check_end(cli, run, steps=10)
    assert "a node it was on has gone: placing it again" in run.output()
    assert "waits for room" in run.output()
    logs = {path.stem: path.read_text() for path in (run.folder / "logs").iterdir()}
    ranks = {"trainer-agent", "trainer-agent-rank1"}
    assert set(logs) == {"dataflow", "unit-0", "weights", "rollout-0", "rollout-1", *ranks}
    assert "gateway at http://" in logs["rollout-0"]
    assert "metrics at http://" in logs["trainer-agent"]
    cluster.remove("second")
