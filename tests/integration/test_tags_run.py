"""Tags changed while a run trains: nodes come and go, a trainer stops to play and plays again, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import Cli, all_processes_of, steps_of, wait_until

WORKERS = (
    "[{tags: [rollout, train], tflops: 2, bandwidth: 10}, {tags: [train], tflops: 1, bandwidth: 10}, {tags: [rollout]}]"
)
SHORT = [
    "trainer.steps=400",
    "trainer.batch_groups=2",
    "dataflow.group_size=4",
    "data.heldout.arguments={split: heldout, count: 4, seed: 2}",
    "rollout.episodes=8",
    f"resources.workers={WORKERS}",
    "resources.scaling.drain=20",
]
TRAINER, SPARE, NODE = "trainer-agent-rank0", "trainer-agent-rank1", "rollout-0"


def workers(cli: Cli, folder: Path, *change: str) -> dict[str, dict[str, Any]]:
    """Return the table of `rillflow tags` after a change."""
    shown = json.loads(cli.run("tags", str(folder), *change, "--json").output())
    return {worker["name"]: worker for worker in shown["workers"]}


def trainer_of(folder: Path) -> psutil.Process | None:
    return dict(all_processes_of(folder)).get("trainer")


def plays(folder: Path) -> str | None:
    """Return the trainer's argument `--playing`; None while no trainer runs."""
    trainer = trainer_of(folder)
    words = trainer.info["cmdline"] if trainer is not None else []
    return words[words.index("--playing") + 1] if "--playing" in words else None if not words else "by the recipe"


def wait_for_steps(folder: Path, more: int) -> None:
    wanted = steps_of(folder) + more
    wait_until(lambda: steps_of(folder) >= wanted, f"{more} more steps", 600)


@pytest.mark.slow
def test_tags_change_while_the_run_trains(cli: Cli) -> None:
    run = cli.start("run", "stockroom", *SHORT)
    wait_until(lambda: any(run.runs.iterdir()) and steps_of(run.folder) >= 1, "the first step", 600)
    folder = run.folder
    first = trainer_of(folder)
    before = workers(cli, folder)
    assert {name: worker["process"] for name, worker in before.items()} == {
        TRAINER: "trainer-agent", SPARE: "", NODE: "rollout-0",
    }  # fmt: skip

    # A spare worker gets a tag: a node more. The one that was there first loses its own: it drains and goes.
    workers(cli, folder, SPARE, "rollout")
    new = f"rollout-{SPARE}"
    wait_until((folder / "endpoints" / f"{new}.json").is_file, "the new node", 600)
    workers(cli, folder, NODE, "none")
    wait_until(lambda: f"name {NODE}" not in nodes(folder), f"{NODE} to go", 600)
    assert f"name {new}" in nodes(folder)
    wait_for_steps(folder, 2)
    assert trainer_of(folder) == first, "the trainer has noticed nothing"

    # The trainer may not play any more; then it may again. Each time it goes on from its checkpoint.
    workers(cli, folder, TRAINER, "-rollout")
    wait_until(lambda: plays(folder) == "", "a trainer that does not play", 600)
    wait_for_steps(folder, 2)
    workers(cli, folder, TRAINER, "+rollout")
    wait_until(lambda: plays(folder) == "by the recipe", "a trainer that plays", 600)
    wait_for_steps(folder, 2)

    refused = cli.run("tags", str(folder), TRAINER, "-train", code=2)
    assert "no worker can train agent" in refused.output()
    run.interrupt()
    assert run.wait(60) == 130
    assert not list(all_processes_of(folder))
    audited = json.loads(cli.run("audit", str(folder), "--json").output())
    assert audited["balanced"]


def nodes(folder: Path) -> str:
    """The rollout processes, as `name NAME` each."""
    found = [process.info["cmdline"] for role, process in all_processes_of(folder) if role == "rollout"]
    return " ".join(f"name {words[words.index('--name') + 1]} " for words in found)
