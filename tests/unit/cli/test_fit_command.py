"""`rillflow fit`: help, refusals before anything is made, and what its view shows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rillflow.cli import fit
from rillflow.cli.main import app
from rillflow.observe.run_view import LiveLine
from rillflow.trainer.supervised.fit import Progress

runner = CliRunner()
ROW = {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "17"}]}


def recipe(folder: Path, *rows: Any, **changes: str) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or (ROW,)))
    said = {"name": "mine", "task": "sft", "model": "tiny", "data": "{train: {path: rows.jsonl}}"} | changes
    path = folder / "mine.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in said.items()))
    return str(path)


def test_help() -> None:
    result = runner.invoke(app, ["fit", "--help"])
    assert result.exit_code == 0
    assert "--resume" in result.output


def test_dry_run_prints_only_what_has_a_meaning() -> None:
    result = runner.invoke(app, ["fit", "reward_model", "trainer.steps=3", "--dry-run"])
    assert result.exit_code == 0
    assert "steps: 3" in result.output
    assert "algorithm" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recipe, or --resume RUN"),
        (["sft", "--resume", "runs/x"], "give a recipe, or --resume RUN"),
        (["quickstart"], "it is for reinforcement learning"),
        (["sft", "--rank", "0"], "give --resume RUN with --rank"),
        (["sft", "data.train={path: /nowhere/rows.jsonl}"], "cannot read the prompts /nowhere/rows.jsonl"),
        (["sft", "data.heldout={path: /nowhere/rows.jsonl}"], "cannot read the prompts /nowhere/rows.jsonl"),
        (["stf"], "did you mean 'sft'"),
        (["sft", "model=nowhere"], "model folder nowhere does not exist"),
        (["sft", "trainer.nodes=[nothing]"], "there is no function 'nothing'"),
    ],
)
def test_what_cannot_work_is_refused_first(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["fit", *arguments, *([] if "--resume" in arguments else ["--runs", str(tmp_path)])])
    assert result.exit_code == 2
    assert message in result.output
    assert not list(tmp_path.iterdir())


def test_run_sends_supervised_recipes_here() -> None:
    result = runner.invoke(app, ["run", "sft"])
    assert result.exit_code == 2
    assert "rillflow fit" in result.output


def test_a_run_leaves_its_model_and_a_state(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = recipe(tmp_path, trainer="{steps: 2, batch_groups: 1}", observe="{trackers: {jsonl: {}}}")
    result = runner.invoke(app, ["fit", path, "--runs", str(runs)])
    assert result.exit_code == 0, result.output
    (folder,) = runs.iterdir()
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"
    assert (folder / "model" / "config.json").is_file()
    assert "step 2/2" in result.output
    sent = [json.loads(line) for line in (folder / "trackers" / "scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in sent] == [1, 2]
    assert {"loss", "mfu", "grad_norm"} <= sent[0]["values"].keys()
    assert list((folder / "tensorboard").iterdir()), "as of a run, it is a tracker by default"
    again = runner.invoke(app, ["fit", "--resume", str(folder)])
    assert again.exit_code == 0, again.output


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = recipe(tmp_path, ROW, {"messages": []})
    result = runner.invoke(app, ["fit", path, "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert "rows.jsonl: row 2: no message is the assistant's" in result.output.replace("\n", "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "state.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_a_bad_row_is_named_by_ranks_too(tmp_path: Path) -> None:
    path = recipe(tmp_path, ROW, {"messages": []}, trainer="{ranks: 2}")
    result = runner.invoke(app, ["fit", path, "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert "a rank ended with code 3" in json.loads((folder / "state.json").read_text())["reason"]
    assert f"rillflow fit --resume {folder}" in result.output.replace("\n", "")


def test_the_view_says_a_line_for_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("rillflow.observe.run_view._PLAIN_EVERY", 1e9)
    looks = [{"loss": 1.0}, {"loss": 0.5}]
    with LiveLine(Console(file=shown)) as live:
        view = fit.View("mine", live)
        for step in (1, 2, 3):
            view.show(Progress(step, 3, {"loss": 2.0 / step, "lr": 1e-3}, looks[step // 3]))
    told = shown.getvalue().splitlines()
    assert told == [
        "mine  step 1/3  loss 2  lr 0.001  held-out: loss 1",
        "mine  step 3/3  loss 0.6667  lr 0.001  held-out: loss 0.5",
    ]
