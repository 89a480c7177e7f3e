"""Paths of a recipe's nodes, losses and reference models are relative to the recipe, wherever it is run from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.config import load_recipe


def test_files_of_nodes_and_losses_are_relative_to_the_recipe(tmp_path: Path) -> None:
    for name in ("mine.py", "loss.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "teacher").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "extends: quickstart\n"
        "trainer:\n"
        "  nodes: [mine.py:a, {function: mine.py:b, options: {path: mine.py}}, pack.age:c]\n"
        "  loss: loss.py:gentle\n"
        "  kl: {reference: teacher}\n"
    )
    trainer = load_recipe(str(tmp_path / "mine.yaml")).policies["agent"].trainer
    assert [node.function for node in trainer.nodes] == [f"{tmp_path}/mine.py:a", f"{tmp_path}/mine.py:b", "pack.age:c"]
    assert trainer.nodes[1].options == {"path": "mine.py"}  # what options mean is the function's business
    assert trainer.loss == f"{tmp_path}/loss.py:gentle"
    assert trainer.kl is not None
    assert trainer.kl.reference == f"{tmp_path}/teacher"


def test_on_the_command_line_they_are_relative_to_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    trainer = load_recipe("quickstart", ["trainer.nodes=[mine.py:a]"]).policies["agent"].trainer
    assert trainer.nodes[0].function == f"{tmp_path}/mine.py:a"
