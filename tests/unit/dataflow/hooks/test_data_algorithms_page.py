"""The examples of the page on data algorithms run as shown."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from hook_groups import Played, prompt

from rillflow.config import load_recipe
from rillflow.dataflow.hooks import CURATORS, FILTERS, SAMPLERS
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import Replay

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "data_algorithms.md").read_text()
REST = """
name: page
policies: {agent: {model: tiny}}
workflow: rillflow.examples.stockroom:play
data: {prompts: {path: prompts.jsonl}}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def hooks_of(tmp_path):
    (tmp_path / "mine.py").write_text("\n".join(blocks("python")))

    def load(snippet: str) -> Hooks:
        (tmp_path / "recipe.yaml").write_text(REST + snippet)
        return Hooks.of(load_recipe(str(tmp_path / "recipe.yaml")).dataflow)

    return load


def test_the_recipe_of_the_page_loads(hooks_of):
    hooks = hooks_of(blocks("yaml")[0])
    assert [name for name, _ in hooks.curators] == ["solved", "greso", "mixing"]
    assert [name for name, _ in hooks.filters] == ["zero_variance", "overlong", "mine.py:not_too_easy"]
    assert isinstance(hooks.sampler, Replay)
    group = Played(prompt("a"), [1.0, 0.9], truncated=[False, False])
    assert hooks.verdict(group) == ("filtered", "too_easy")


def test_the_hook_of_the_page_works(hooks_of):
    hooks = hooks_of(blocks("yaml")[1])
    monotonous, varied = (Played(prompt("a"), [0.0] * 3, lengths=lengths) for lengths in ([5, 5, 6], [5, 6, 7]))
    assert hooks.verdict(monotonous) == ("filtered", "monotonous")
    assert hooks.verdict(varied) == ("ready", "")
    rows = hooks.changes()
    assert rows == [("mine.py:Varied", "", '{"dropped":1}')]
    again = hooks_of(blocks("yaml")[1])
    again.restore(rows)
    assert again.filters[0][1].dropped == 1


@pytest.mark.parametrize("name", [*CURATORS, *FILTERS, *SAMPLERS])
def test_every_hook_and_option_is_on_the_page(name):
    made_of = (CURATORS | FILTERS | SAMPLERS)[name]
    assert f"`{name}`" in PAGE
    for option in inspect.signature(made_of).parameters:
        assert f"`{option}`" in PAGE, option
