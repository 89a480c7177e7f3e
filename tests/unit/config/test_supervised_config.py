"""Recipes of `rillflow fit`: valid ones load, invalid ones are refused with a clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rillflow.config import load_recipe, recipes, write_resolved
from rillflow.config.load import FIT, read_raw, read_resolved
from rillflow.config.supervised import load_fit, read_resolved_fit
from rillflow.errors import ConfigError

MINIMAL = """
name: mine
task: sft
model: tiny
data: {train: {path: rows.jsonl}}
"""


def recipe_file(folder: Path, *lines: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(MINIMAL + "\n".join(lines))
    return str(path)


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    assert load_fit(recipe_file(tmp_path)).data.train.path == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trainer: {clip_low: 0.1}", "trainer.clip_low is of reinforcement learning"),
        ("trainer: {algorithm: ppo}", "trainer.algorithm is of reinforcement learning"),
        ("trainer: {stream_groups: 2}", "trainer.stream_groups is of reinforcement learning"),
        ("trainer: {updates: 2}", "trainer.updates is of reinforcement learning"),
        ("trainer: {learning_rate: 1}", "unknown key trainer.learning_rate"),
        ("dataflow: {}", "unknown key dataflow; .*valid: name, description, task"),
        ("evaluate_evry: 2", "did you mean 'evaluate_every'"),
        ("centring: 0.1", "sft has no centring: it is an option of reward"),
        ("separator: ''", "sft has no separator: it is an option of process_reward"),
        ("task: rl", "'sft', 'reward' or 'process_reward'"),
        ("data: {train: {reasoning_gym: basic}}", "gives prompts without answers"),
        ("data: {train: {}}", "exactly one of `path`"),
    ],
)
def test_what_is_refused(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_fit(recipe_file(tmp_path, line))


def test_adapters_are_for_policies(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora is for sft"):
        load_fit(recipe_file(tmp_path), ["task=reward", "trainer.lora.rank=4"])
    assert load_fit(recipe_file(tmp_path), ["trainer.lora.rank=4"]).trainer.lora is not None


@pytest.mark.parametrize("name", [name for name in recipes() if FIT in read_raw(name)])
def test_shipped_recipes_survive_being_written(name: str, tmp_path: Path) -> None:
    recipe = load_fit(name)
    assert recipe.description
    write_resolved(recipe, tmp_path / "recipe.yaml")
    assert read_resolved_fit(tmp_path / "recipe.yaml") == recipe
    assert "algorithm" not in yaml.safe_load((tmp_path / "recipe.yaml").read_text())["trainer"]


@pytest.mark.parametrize(
    ("overrides", "bounded"),
    [([], True), (["data.epochs=2"], False), (["data.epochs=2", "trainer.steps=3"], True)],
)
def test_default_steps_do_not_cut_epochs_short(overrides: list[str], bounded: bool, tmp_path: Path) -> None:
    recipe = load_fit(recipe_file(tmp_path), overrides)
    assert recipe.bounded is bounded
    write_resolved(recipe, tmp_path / "recipe.yaml")
    assert read_resolved_fit(tmp_path / "recipe.yaml").bounded is bounded


def test_the_two_kinds_of_recipes_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for supervised training") as caught:
        load_recipe(recipe_file(tmp_path))
    assert "rillflow fit" in caught.value.hint
    with pytest.raises(ConfigError, match="for reinforcement learning") as caught:
        load_fit("quickstart")
    assert "rillflow run" in caught.value.hint


def test_a_folder_of_supervised_training_is_told_apart(tmp_path: Path) -> None:
    write_resolved(load_fit(recipe_file(tmp_path)), tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError, match="is a run of supervised training") as caught:
        read_resolved(tmp_path / "recipe.yaml")
    assert str(tmp_path / "model") in caught.value.hint
    assert f"rillflow fit --resume {tmp_path}" in caught.value.hint
