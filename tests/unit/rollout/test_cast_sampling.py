"""Whose sampling counts by default: a workflow's own, and the recipe's for programs of other people."""

from __future__ import annotations

import pytest

from rillflow.config import load_recipe
from rillflow.rollout.cast import _sampling


@pytest.mark.parametrize(
    ("name", "given", "wins"),
    [
        ("quickstart", [], "agent"),
        ("command_agent", [], "recipe"),
        ("outside_agent", [], "recipe"),
        ("command_agent", ["policies.agent.sampling.wins=agent"], "agent"),
        ("quickstart", ["policies.agent.sampling.wins=recipe"], "recipe"),
    ],
)
def test_who_wins(name: str, given: list[str], wins: str) -> None:
    recipe = load_recipe(name, given)
    assert _sampling(recipe, recipe.policies["agent"].sampling).wins == wins
