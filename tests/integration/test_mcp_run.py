"""A workflow whose tool is an MCP server's, trained for a few steps: over pipes and over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from advised import wrong_with
from commands import Cli, Started, processes_of, wait_until

SERVER = "rillflow.examples.stockroom_mcp"
SMALL = (
    "trainer.steps=3", "trainer.batch_groups=2", "evaluation.every=0", "data.heldout.arguments.count=8",
    "rollout.episodes=16",
)  # fmt: skip


def servers_of(run: Started) -> list[psutil.Process]:
    node = processes_of(run.folder).get("rollout")
    children = [] if node is None else node.children()
    return [child for child in children if SERVER in child.cmdline()]


def check(cli: Cli, run: Started) -> None:
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward_mean"] for step in steps if "reward_mean" in step]
    assert len(rewards) == 3
    # Only what the tool says can be right more often than one time in ninety.
    assert all(reward > 0.1 for reward in rewards)
    audit = json.loads(cli.run("audit", str(run.folder), "--json").output())
    assert audit["balanced"]


@pytest.mark.slow
def test_over_stdio_with_a_server_that_dies(cli: Cli) -> None:
    run = cli.start("run", "mcp_stdio", *SMALL)
    wait_until(lambda: run.process.poll() is not None or (run.runs.is_dir() and any(run.runs.iterdir())), "a folder")
    wait_until(lambda: servers_of(run) or run.process.poll() is not None, "the MCP server", 600)
    (first,) = servers_of(run)
    wait_until(lambda: "reward_mean" in _metrics(run) or run.process.poll() is not None, "the first step", 600)
    first.kill()
    assert run.wait(600) == 0, run.output()
    check(cli, run)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("STOCKROOM_TOKEN", "a-token-of-the-test")
    command = [sys.executable, "-m", SERVER, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


@pytest.mark.slow
def test_over_http(cli: Cli, served: str) -> None:
    run = cli.run("run", "mcp_http", *SMALL, f"tools.0.mcp.url={served}")
    check(cli, run)
    assert wrong_with(run.folder) == []
    assert "a-token-of-the-test" not in (run.folder / "recipe.yaml").read_text()


def _metrics(run: Started) -> str:
    file = run.folder / "metrics.jsonl"
    return file.read_text() if file.exists() else ""
