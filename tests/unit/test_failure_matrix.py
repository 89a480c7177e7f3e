"""The failure matrix is complete, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()
FAULTS = ["kill -9", "SIGSTOP", "connection cut", "slow network", "full disk"]
KINDS = [
    "Dataflow service",
    "Storage unit",
    "Gateway and rollout node",
    "Engine",
    "Trainer",
    "Relay",
    "Maintainer",
    "Ray",
]


def section(kind: str) -> str:
    found = re.search(rf"^## {kind}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section about {kind}"
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_meets_every_fault(kind: str) -> None:
    rows = [line.split("|")[1:-1] for line in section(kind).splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == FAULTS
    assert all(cell.strip() for row in rows for cell in row)


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > len(FAULTS) * len(KINDS) // 2
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
