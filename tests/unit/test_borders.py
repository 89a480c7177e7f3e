"""A package imports those above it in DESIGN's list, never those below; three never import each other, and none
imports the examples."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rillflow

ROOT = Path(rillflow.__file__).parent
ORDER = [
    "errors", "batching", "types", "contracts", "kernels", "storage", "config", "wire", "clients", "weights", "engine",
    "gateway", "dataflow", "agents", "examples", "rollout", "trainer", "stages", "evaluate", "resources", "runtime",
    "observe", "dashboard", "cli", "api",
]  # fmt: skip
APART = {"dataflow", "rollout", "trainer"}


def imports_of(path: Path) -> set[str]:
    """Names of rillflow's own parts that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("rillflow.") and "__" not in name}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = [path for path in sorted(ROOT.rglob("*.py")) if part_of(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("part", sorted({part_of(path) for path in FILES}))
def test_imports_go_up_only(part: str) -> None:
    assert part in ORDER, f"{part} is not a part of the design"
    for path in FILES:
        for imported in imports_of(path) if part_of(path) == part else ():
            assert ORDER.index(imported) <= ORDER.index(part), f"{path} must not import {imported}"
            assert not (imported != part and {imported, part} <= APART), f"{path} must not import {imported}"
            assert imported != "examples" or part == "examples", f"{path} must not import the examples"


def test_the_check_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("def f():\n    from rillflow.trainer import loop\nimport rillflow.wire.client\n")
    assert imports_of(file) == {"trainer", "wire"}
