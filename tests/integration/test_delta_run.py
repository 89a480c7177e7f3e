"""A whole run whose weights travel as deltas: read from the run's folder, or over HTTP from its weight server."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch

from commands import Cli, processes_of, steps_of, wait_until
from rillflow.weights import FolderStore
from rillflow.weights.delta import Ahead

STEPS = 4
TINY = [
    "policies.agent.engine.dtype=bf16",
    "policies.agent.weights.mode=delta",
    f"trainer.steps={STEPS}",
    "trainer.batch_groups=2",
    "dataflow.group_size=4",
    "rollout.episodes=8",
    "data.heldout=null",
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """A trainer that must compile its encoder first publishes whole versions meanwhile: here it is to find it."""
    assert Ahead(torch.bfloat16, torch.device("cpu")).wait(600)


def check(folder: Path) -> None:
    """Versions were published as deltas as soon as the encoder was loaded, and nodes took these."""
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"
    store = FolderStore(folder / "weights" / "agent")
    assert store.head() == STEPS
    entries = store.line().entries
    whole = [version for version in entries if entries[version].full_bytes]
    assert whole == list(range(len(whole)))
    assert [version for version in entries if not entries[version].delta_bytes] == whole
    assert entries[STEPS].delta_bytes
    store.pull(STEPS)
    log = (folder / "logs" / "rollout-0.log").read_text()
    loads = re.findall(r"policy agent: version (\d+), (\w+), \d+ bytes", log)
    assert len(loads) >= 2, log
    assert loads[-1][1] == "delta", log
    assert processes_of(folder) == {}


@pytest.mark.slow
def test_from_the_runs_folder(cli: Cli) -> None:
    folder = cli.run("run", "stockroom", *TINY, seconds=600).folder
    check(folder)
    assert not (folder / "cache").exists()
    cli.run("audit", str(folder))


@pytest.mark.slow
def test_from_the_runs_weight_server(cli: Cli) -> None:
    port = free_port()
    server = ["runtime.weights_server=true", f"runtime.weights_port={port}"]
    source = f"policies.agent.weights.source=http://127.0.0.1:{port}"
    folder = cli.run("run", "stockroom", *TINY, *server, source, seconds=600).folder
    check(folder)
    cache = folder / "cache" / "rollout-0" / "agent"
    assert cache.is_dir(), "the node has not fetched from the server"
    left = {path.parent.name for path in cache.rglob("*") if path.is_file()}
    assert len(left) <= 1, "what was taken is not kept; the run may end while one comes"
    cli.run("audit", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("plays", [False, True])
def test_a_source_that_nobody_serves(cli: Cli, plays: bool) -> None:
    """The node says so, once, and samples nothing: its weights are not verified. Without probes it plays on, as far
    as the staleness bound lets it."""
    source = f"policies.agent.weights.source=http://127.0.0.1:{free_port()}"
    run = cli.start("run", "stockroom", *TINY, source, *(["policies.agent.weights.probe=off"] if plays else []))
    said = f"no newer version loaded, {'version 0 goes on' if plays else 'the engine samples nothing'}"

    def log() -> str:
        path = run.folder / "logs" / "rollout-0.log"
        return path.read_text() if path.exists() else ""

    wait_until(lambda: any(run.runs.iterdir()) and said in log(), "a word of the node", 600)
    if plays:
        wait_until(lambda: steps_of(run.folder) >= 2, "two steps", 600)
    else:
        assert steps_of(run.folder) == 0
    assert processes_of(run.folder)["rollout"].is_running()
    assert log().count(said) <= 4, log()
    assert said in log()
    assert "cannot reach http://127.0.0.1" in log()
    run.interrupt()
    assert run.wait(60) == 130
