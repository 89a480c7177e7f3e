"""Agents of nine frameworks, unmodified and each in its own environment, are trained by their recipes for a step.

The table of docs/frameworks.md has what this prints with `-s`: samples, forks and seconds of an episode.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_play import VENVS

from commands import Cli, Started, wait_until
from needs import ROOT, require

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]

RECIPES = ROOT / "recipes" / "frameworks"
EPISODES = 2
# One step on one group of two. The tiny policy earns nothing, so groups of equal rewards are trained, too.
SHORT = (
    "trainer.steps=1", "trainer.batch_groups=1", f"dataflow.group_size={EPISODES}", "dataflow.filters=[]",
    "dataflow.staleness=0", "data.heldout=null", "observe.plot=false", "observe.trackers.tensorboard=false",
    "rollout.episodes=1",  # the second process of a framework finds the bytecode that the first one has written
)  # fmt: skip


@dataclass(frozen=True)
class Framework:
    """A recipe, the package whose environment it names, and whether an episode is one path, whatever its turns."""

    recipe: str
    package: str
    one_path: bool = True


FRAMEWORKS = (
    Framework("pydantic_ai", "pydantic-ai-slim"),
    Framework("langgraph", "langchain-openai"),
    Framework("smolagents", "smolagents", one_path=False),
    Framework("dspy", "dspy", one_path=False),
    Framework("autogen", "autogen-agentchat"),
    Framework("instructor", "instructor"),
    Framework("crewai", "crewai"),
    Framework("openai_agents", "openai-agents"),
    Framework("anthropic", "anthropic"),
)


def trained(name: str, run: Started) -> list[dict[str, Any]]:
    """Return, and print, the completed episodes of a run that made its step: calls, samples, seconds and metrics."""
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["end"], summary["steps"]) == ("done", 1)
    with closing(sqlite3.connect(f"file:{run.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        ledger.row_factory = sqlite3.Row
        rows = ledger.execute("SELECT * FROM tasks WHERE state = 'done'").fetchall()
    episodes = [{**dict(row), **json.loads(row["metrics"])} for row in rows]
    for one in episodes:
        told = ("calls", "samples", "forks", "tokens_forwarded", "tokens_trained", "seconds")
        print(f"{name}: " + ", ".join(f"{key} {one[key]:.4g}" for key in told))
    ends = {name: count for name, count in summary["counts"].items() if name.startswith(("ended.", "failures."))}
    print(f"{name}: {ends or 'every episode ended with an answer'}", *summary["notes"].values(), sep="; ")
    return episodes


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.recipe)
def test_a_framework_is_trained_by_its_recipe(framework: Framework, cli: Cli) -> None:
    require(f"agents/{framework.package}")
    run = cli.run("run", str(RECIPES / f"{framework.recipe}.yaml"), *SHORT)
    episodes = trained(framework.recipe, run)
    assert len(episodes) >= EPISODES
    for one in episodes:
        assert one["tokens_trained"] > 0
        assert (one["samples"], one["forks"]) == (1, 0) if framework.one_path else one["forks"] > 0
    assert json.loads(cli.run("audit", str(run.folder), "--json").output())["balanced"]


def test_one_process_plays_many_episodes_from_outside(cli: Cli) -> None:
    """A framework that is slow to import is imported once: `outside: true`."""
    require("agents/crewai")
    run = cli.start("run", str(RECIPES / "crewai_outside.yaml"), *SHORT)
    wait_until(lambda: "agents connect at" in run.output(), "the gateway", 600)
    url = json.loads((run.folder / "endpoints" / "rollout-0.json").read_text())["url"]
    program = [VENVS / "crewai" / "bin" / "python", RECIPES / "crewai_outside.py", url, run.folder / "run.json"]
    log = Path(cli.cwd / "agent.log")
    with open(log, "w") as output:
        agent = subprocess.Popen(list(map(str, program)), stdout=output, stderr=subprocess.STDOUT, cwd=cli.cwd)
    try:
        assert run.wait(600) == 0, run.output()[-3000:] + log.read_text()[-3000:]
        assert agent.wait(120) == 0, log.read_text()[-3000:]
    finally:
        agent.kill()
        agent.wait(60)
    assert len(trained("crewai_outside", run)) >= EPISODES
