"""Every shipped recipe has a row in the result file, with a number or with the reason why there is none."""

from __future__ import annotations

import json

import pytest

from bench import recipes
from bench.arms import Mean
from rillflow.config.load import read_raw

ROWS = json.loads(recipes.RECORDED.read_text())["recipes"]


def test_every_recipe_file_has_a_row() -> None:
    assert set(ROWS) == set(recipes.shipped())


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_all_numbers_or_says_what_is_missing(name: str) -> None:
    row = ROWS[name]
    numbers = ("before", "after", "interval", "seeds", "samples", "seconds", "machine", "command")
    assert row["reason"] or all(row[key] is not None for key in numbers)
    if row["after"] is not None:
        assert all(row[key] is not None for key in ("measure", "seeds", "machine", "command"))


def test_recipes_are_run_by_the_command_that_they_are_for() -> None:
    assert set(recipes.MEASURED) <= set(recipes.shipped())
    for name in recipes.FITS:
        assert "task" in read_raw(name)
    for name, start in recipes.RUNS.items():
        raw = read_raw(name)
        assert "task" not in raw
        assert not start.recipe or (start.recipe in recipes.FITS and set(start.policies) <= set(raw["policies"]))


def test_a_row_is_the_mean_of_its_seeds() -> None:
    results = [recipes.Result(0.2, Mean(after, 0.1), 128, 10.0) for after in (0.6, 0.8)]
    row = recipes.row("household", results)
    assert (row["before"], row["after"], row["seeds"], row["start"]) == (0.2, pytest.approx(0.7), 2, "household_sft")
    assert row["interval"] == pytest.approx(0.196)
    assert recipes.row("stockroom", results[:1])["interval"] == 0.1
    assert recipes.row("sft", results)["measure"] == "held-out loss"
    assert recipes.row("reward_model", results)["measure"] == "held-out accuracy"
