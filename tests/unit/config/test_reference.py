from __future__ import annotations

from pathlib import Path

from rillflow.config.reference import reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "recipes.md"


def test_the_page_of_recipe_keys_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `python -m rillflow.config.reference > docs/recipes.md`"
