"""`rillflow show`: the table of kept episodes, and one of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kept_trajectories import token_path, trajectory
from rillflow.cli.main import app
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import FILE, KINDS, Trajectory


def forked() -> Trajectory:
    """Return an episode with a tool call, a fork and a reward of one answer."""
    call = {"function": {"name": "count", "arguments": '{"box": "red", "item": "pens"}'}}
    paths = [
        {
            "policy": "solver", "follows": None, "shared": 0, "fork": "", "finish": "stop", "agent": "planner",
            "messages": [
                {"role": "user", "content": "How many pens?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "18"},
                {"role": "assistant", "content": "18"},
            ],
            "rewards": [{"message": 3, "reward": 0.5}],
        },
        {
            "policy": "solver", "follows": 0, "shared": 3, "fork": "history", "finish": "length",
            "messages": [{"role": "assistant", "content": "eighteen"}],
            "seams": [{"message": 0, "token": 1, "cause": "weights"}],
        },
    ]  # fmt: skip
    samples = [
        token_path(8, policy="solver", role="planner", advantages=np.linspace(-1, 1, 8, dtype=np.float32)),
        token_path(5, policy="solver", path=1, fork="history", truncated=True),
    ]
    made = trajectory("t000001.2", samples=samples, kept="best", step=3, reward=0.75, prompt="pens", node="n0")
    return replace(made, paths=paths, rewards={"format": 0.25})


def failed() -> Trajectory:
    made = trajectory("t000002.0-1", samples=[], status="failed", kept="failure", cause="tool_error", reward=None)
    return replace(made, error="Traceback …\nKeyError: 'pens'", rewards={})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("policies: {solver: {model: tiny}, policy: {model: tiny}}\n")
    store = TrajectoryStore(tmp_path / FILE, Bounds(bytes=4 << 20, most=dict.fromkeys(KINDS, 100)))
    store.add(forked())
    store.add(failed())
    for n in range(40):
        long = f"a-prompt-with-a-long-name-{n}"
        store.add(
            trajectory(f"t0001{n:02}.7", time=10.0 + n, step=n, prompt=long, kept="evaluation", lane="evaluation")
        )
    store.close()
    return tmp_path


def show(run: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["show", str(run), *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result


def test_the_table_fits_80_columns_and_cuts_only_prompts(run: Path) -> None:
    lines = show(run).output.splitlines()
    assert all(len(line) <= 80 for line in lines[:31])
    assert lines[0].split() == [
        "episode",
        "kept",
        "step",
        "reward",
        "adv.",
        "tokens",
        "calls",
        "forks",
        "version",
        "prompt",
    ]
    assert lines[1].startswith("t000139.7  eval    39       1")
    assert "30 of 42 episodes" in lines[31]
    assert len(show(run, "--limit", "100").output.splitlines()) == 44


def test_filters(run: Path) -> None:
    def names(*arguments: str) -> list[str]:
        return [info["id"] for info in json.loads(show(run, "--json", *arguments).output)]

    assert names("--status", "failed") == ["t000002.0-1"]
    assert names("--kept", "best", "--kept", "failure", "--order", "id") == ["t000001.2", "t000002.0-1"]
    assert names("--step", "3:4", "--order", "time") == ["t000001.2", "t000103.7", "t000104.7"]
    assert names("--step", "39") == ["t000139.7"]
    assert names("--reward", "0.5:0.9") == names("--policy", "solver") == names("--role", "planner") == ["t000001.2"]
    assert names("--reward", ":0.9", "--lane", "train") == ["t000001.2"]
    assert names("--version", "9:") == []
    assert "no episode that fits" in show(run, "--version", "9:", code=2).output


def test_an_episode_with_its_tool_calls_forks_and_rewards(run: Path) -> None:
    said = show(run, "t000001.2").output
    for part in (
        "t000001.2  train, best, step 3; prompt pens",
        'payload    {"question": "sky"}',
        "── path 0 of solver, 8 tokens, 6 trained, reward 1",
        "user       How many pens?",
        'planner    count(box="red", item="pens")',
        "tool       18",
        "planner    18  [reward 0.5]",
        "── path 1 of solver, leaves path 0 after 3 messages (history), 5 tokens, 3 trained, reward 1",
        "assistant  eighteen  [cut and continued (weights), cut by its length]",
        "reward     0.75",
        "           format 0.25",
        "13 tokens, 9 of them trained, 2 samples, 1 fork, advantage",
    ):
        assert part in said, (part, said)
    assert said.count("How many pens?") == 1, "what paths share is shown once"
    assert "tokens  " not in said
    assert show(run, "t000001.2", "--path", "1").output.count("How many pens?") == 1
    assert "eighteen" not in show(run, "t000001.2", "--path", "0").output


@pytest.mark.parametrize("colouring", ["mask", "version", "advantage", "logprob", "gap"])
def test_tokens_in_colours(run: Path, colouring: str) -> None:
    said = show(run, "t000001.2", "--tokens", colouring).output
    assert said.count("\ntokens ") == 2
    assert "dim: " in said


def test_a_failure_with_its_error(run: Path) -> None:
    said = show(run, "t000002.0-1").output
    assert "failed: tool_error" in said
    assert "KeyError: 'pens'" in said


def test_json_of_one(run: Path) -> None:
    found = json.loads(show(run, "t000001.2", "--json").output)
    assert found["info"]["id"] == "t000001.2"
    assert found["samples"][0]["advantages"][0] == -1.0
    assert found["samples"][1]["advantages"] is None
    assert found["paths"][1]["fork"] == "history"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "no trajectory 'nope'"),
        (["t000001.2", "--path", "2"], "has 2 paths"),
        (["--step", "x"], "--step x is not a number"),
        (["--reward", "1"], "--reward 1 is not a range"),
        (["--order", "size"], "not ordered by"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_line(run: Path, arguments: list[str], said: str) -> None:
    output = show(run, *arguments, code=2).output
    assert said in output
    assert "what to do: " in output


def test_folders_without_episodes(tmp_path: Path) -> None:
    assert "is not a run folder" in show(tmp_path, code=2).output
    (tmp_path / "recipe.yaml").touch()
    assert "has kept no episode\n" in show(tmp_path, code=2).output
