"""The page of routes is the one that the declarations make."""

from __future__ import annotations

from pathlib import Path

from scripts.routes_page import page


def test_the_page_of_routes_is_up_to_date() -> None:
    committed = (Path(__file__).parents[2] / "docs" / "routes.md").read_text()
    assert committed == page(), "run `python scripts/routes_page.py > docs/routes.md`"
