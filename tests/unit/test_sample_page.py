"""Every file and name on the page "One sample through the code" exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs" / "one_sample.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_a_name_of_the_page_exists(file: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / "src" / "rillflow" / file).read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = getattr(found[0], "body", [])
