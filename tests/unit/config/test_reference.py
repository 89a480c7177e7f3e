from __future__ import annotations

from pathlib import Path

from rillflow.config import base, policy, rollout, runs, schema, supervised, trainer
from scripts.recipes_page import SECTIONS, reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "recipes.md"


def test_the_page_of_recipe_keys_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `python -m scripts.reference_pages`"


def test_no_section_of_a_recipe_is_left_out() -> None:
    written_short = {base.Section, base.Named, rollout.HookConfig, trainer.AlgorithmConfig}
    sections = {
        kind
        for module in (policy, rollout, runs, schema, supervised, trainer)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, base.Section)
    }
    assert sections - written_short == set(SECTIONS.values())
