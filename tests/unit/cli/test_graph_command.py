"""`rillflow graph`: the table, the drawing, and refusals as clear as those of `rillflow run`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.config import recipes
from rillflow.trainer.graph.nodes import REGISTRY

SUPERVISED = "rillflow.trainer.supervised.functions"
runner = CliRunner()


def test_help() -> None:
    output = runner.invoke(app, ["graph", "--help"]).output
    for word in ("recipe", "overrides", "--policy", "--svg"):
        assert word in output


def test_the_graph_of_a_shipped_recipe() -> None:
    result = runner.invoke(app, ["graph", "quickstart"])
    assert result.exit_code == 0
    assert "A step of agent: grpo, asynchronous" in result.output
    for node in ("fetch", "advantages", "train_actor", "publish"):
        assert node in result.output


@pytest.mark.parametrize("recipe", recipes())
def test_every_shipped_recipe_has_one(recipe: str) -> None:
    result = runner.invoke(app, ["graph", recipe])
    assert result.exit_code == 0, result.output
    assert "publish" in result.output


def test_a_recipe_of_fit_has_no_policies() -> None:
    result = runner.invoke(app, ["graph", "sft", "--policy", "agent"])
    assert result.exit_code == 2
    assert "trains one model" in result.output


def test_overrides_change_it_and_names_are_never_cut() -> None:
    result = runner.invoke(
        app, ["graph", "quickstart", "trainer.algorithm=ppo", "runtime.mode=colocated", "trainer.kl.where=reward"]
    )
    assert "ppo, colocated" in result.output
    for name in ("generate", "reference_logprobs", "step_reward_N", "critic compute", "advantage_N"):
        assert name in result.output
    assert "…" not in result.output


def test_the_drawing(tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    result = runner.invoke(app, ["graph", "quickstart", "--svg", str(file)])
    assert result.exit_code == 0
    assert f"drawn in {file}" in result.output.replace("\n", "")
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "other"], "the recipe has no policy 'other'"),
        (["trainer.nodes=[kl_reward]"], "reads reference_N, which no node before it makes"),
        (["trainer.nodes=[advantage]"], "did you mean 'advantages'"),
        (["trainer.graph=[fetch, train_actor]"], "no publish node"),
        (["trainer.algorithm=ppoo"], "trainer.algorithm"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["graph", "quickstart", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_run_with_a_graph_that_cannot_work_does_not_start(tmp_path: Path) -> None:
    result = runner.invoke(app, ["run", "quickstart", "trainer.nodes=[kl_reward]", "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert "reads reference_N" in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


def test_functions_of_supervised_training_are_refused_as_a_run_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does not import the module that registers them, which another test may have imported."""
    monkeypatch.delitem(sys.modules, SUPERVISED, raising=False)
    others = {name: one for name, one in REGISTRY._by_name.items() if one.run.__module__ != SUPERVISED}
    monkeypatch.setattr(REGISTRY, "_by_name", others)
    result = runner.invoke(app, ["graph", "quickstart", "trainer.nodes=[train_sft]"])
    assert result.exit_code == 2
    assert "there is no function 'train_sft'" in result.output
    assert SUPERVISED not in sys.modules
