"""What the page "Step graphs" says is so: its drawing, its examples and its table of functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rillflow.config import load_recipe
from rillflow.trainer.graph import functions
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.databuffer import FETCHED
from rillflow.trainer.graph.drawing import svg
from rillflow.trainer.graph.registry import REGISTRY

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = (DOCS / "graphs.md").read_text()
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
SECTIONS = [yaml.safe_load(text)["trainer"] for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_drawing_is_of_the_command_above_it() -> None:
    """After a change that is meant, run the command with --svg docs/images/step-ppo.svg."""
    (overrides,) = re.findall(r"\$ rillflow graph quickstart (.*) --svg", PAGE)
    recipe = load_recipe("quickstart", overrides.split())
    assert (DOCS / "images" / "step-ppo.svg").read_text() == svg(chain_of(recipe.policies["agent"].trainer))


def test_the_example_can_be_planned(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    recipe = load_recipe(str(tmp_path / "short.yaml"))
    assert [node.id for node in chain_of(recipe.policies["agent"].trainer).nodes] == [
        "fetch", "shorter", "group_statistics", "advantages", "train_actor", "publish",
    ]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: next(iter(section)))
def test_other_examples_can_be_planned(section: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FILES["rewards.py"])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extends": "quickstart", "trainer": section}))
    trainer = load_recipe(str(tmp_path / "mine.yaml")).policies["agent"].trainer
    assert len(chain_of(trainer).nodes) == (7 if trainer.nodes else 5)


def test_the_table_has_every_function_and_the_text_every_column_of_rows() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    listed = {name: (what, makes) for names, what, _, makes in rows for name in re.findall(r"`(\w+)`", names)}
    own = [name for name in REGISTRY.names if _module(name).startswith(functions.__name__)]
    assert sorted(listed) == own
    for name, (what, makes) in listed.items():
        found = REGISTRY.named(name)
        assert found is not None
        assert what.split()[0] == found.role
        assert set(re.findall(r"`(\w+_[RN])`", makes)) == set(found.gives)
    for column in FETCHED:
        assert f"`{column}`" in PAGE


def _module(name: str) -> str:
    found = REGISTRY.named(name)
    assert found is not None
    return str(found.run.__module__)
