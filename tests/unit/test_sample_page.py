"""Every file and name on the page "One sample through the code" exists, and its link leads to its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.source_links import line_of, named

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("file", "name"), named())
def test_a_name_of_the_page_has_a_line(file: str, name: str) -> None:
    lines = (ROOT / "src" / "rillflow" / file).read_text().splitlines()
    assert f" {name.rpartition('.')[2]}" in lines[line_of(file, name) - 1]


def test_a_name_that_a_file_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Node\.fly"):
        line_of("rollout/node.py", "Node.fly")
