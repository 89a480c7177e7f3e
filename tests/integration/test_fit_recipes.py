"""The shipped supervised recipes learn, as commands of their own; a run that was killed ends the same; ranks agree."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from advised import wrong_with
from commands import Cli, wait_until
from rillflow.cli.main import app
from rillflow.examples import stockroom
from rillflow.trainer.supervised.reward_model import RewardModel
from soak import repetitions


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def looks(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line.get("event") == "evaluation"]


@pytest.mark.slow
def test_sft_learns_the_demonstrations(cli: Cli) -> None:
    folder = cli.run("fit", "sft", seconds=600).folder
    first, *_, last = looks(folder)
    assert last["loss"] < 0.1 * first["loss"]
    assert wrong_with(folder) == []


@pytest.mark.slow
def test_a_reward_model_learns_which_play_is_right(cli: Cli) -> None:
    folder = cli.run("fit", "reward_model", seconds=600).folder
    first, *_, last = looks(folder)
    assert first["accuracy"] < 0.6
    assert last["accuracy"] > 0.8
    assert last["loss"] < 0.5 * first["loss"]
    model = RewardModel.load(str(folder / "model"))
    rows = [row["payload"] for row in stockroom.comparisons("heldout", 40, 9)]
    better, worse = (
        model.score([{"messages": row["messages"], "tools": row["tools"], "answer": row[kind]} for row in rows])
        for kind in ("chosen", "rejected")
    )
    assert sum(a > b for a, b in zip(better, worse, strict=True)) > 30


@pytest.mark.slow
def test_a_process_reward_model_learns_which_steps_are_good(cli: Cli) -> None:
    folder = cli.run("fit", "process_reward", seconds=600).folder
    last = looks(folder)[-1]
    assert last["correlation"] > 0.6
    assert last["auc"] > 0.8


SHORT = (
    "trainer.steps=8",
    "trainer.checkpoint_every=2",
    "trainer.batch_groups=8",
    "data.train.arguments.count=64",
)
FEW = "data.heldout.arguments.count=16"


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been(cli: Cli) -> None:
    arguments = ("fit", "sft", *SHORT, "runtime.deterministic=true", "data.heldout=null")
    whole = cli.run(*arguments, seconds=600).folder
    started = cli.start(*arguments)
    wait_until(lambda: started.folder != whole and (started.folder / "metrics.jsonl").is_file(), "a second run")
    wait_until(lambda: len(lines(started.folder)) >= 3, "its third step")
    started.process.send_signal(signal.SIGKILL)
    started.wait(120)
    folder = started.folder
    cli.run("fit", "--resume", str(folder), seconds=600)
    weights = [load_file(each / "model" / "model.safetensors") for each in (whole, folder)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [[line["loss"] for line in lines(each)] for each in (whole, folder)]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("recipe", "shared"),
    repetitions(
        [("sft", "sharding=none"), ("process_reward", "sharding=fsdp"), ("sft", "context_ranks=2")],
        [
            ("sft", "sharding=none"),
            ("reward_model", "sharding=none"),
            ("process_reward", "sharding=fsdp"),
            ("sft", "context_ranks=2"),
            ("reward_model", "context_ranks=2"),
        ],
    ),
)
def test_two_ranks_have_the_curve_of_one(cli: Cli, recipe: str, shared: str) -> None:
    settings = (*SHORT, FEW, "trainer.steps=4")
    result = CliRunner().invoke(app, ["fit", recipe, *settings, "--runs", str(cli.cwd / "one")])  # no process to start
    assert result.exit_code == 0, result.output
    (one,) = (cli.cwd / "one").iterdir()
    two = cli.run("fit", recipe, *settings, "trainer.ranks=2", f"trainer.{shared}", seconds=600).folder
    curves = [[line["loss"] for line in lines(folder)] for folder in (one, two)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4, abs=1e-6)
    assert (two / "model" / "config.json").is_file()
