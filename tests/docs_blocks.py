"""The fenced blocks of the documentation and the command lines in them, as parameters of tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# The blocks of api.md are signatures, which the generator takes from the code.
PAGES = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")} - {ROOT / "docs" / "api.md"})
# The commands that read a run: `integration/test_run.py` executes them as they are written.
READING = {"audit", "balance", "show", "status", "timeline", "token", "top", "trace"}
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def blocks(*languages: str) -> Iterator[Any]:
    """Yield the fenced blocks of these languages in all pages, as parameters of a test."""
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            if found[2] in languages:
                indent = len(found[1])
                code = "\n".join(line[indent:] for line in found[3].splitlines())
                line = text.count("\n", 0, found.start()) + 1
                yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}")


def command_lines() -> Iterator[Any]:
    for block in blocks("", "bash", "console"):
        (code,) = block.values
        for line in code.replace("\\\n", " ").splitlines():
            words = re.sub(r"\s#\s.*|&$", "", re.sub(r"^(host-\w+)?\$ ", "", line)).strip()
            words = re.sub(r"^(\w+=\S+ +)+", "", words)
            if re.match(r"(rillflow [a-z]|python -m (bench|scripts)|bash scripts/|make [a-z])", words):
                yield pytest.param(words, id=f"{block.id} {words[:60]}")
