"""Mutants: every one is valid source, the sample is fixed by its seed, and the fate of each is reported."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import Copies, Mutant, located, mutants_of, mutated, sample

SOURCE = '''\
"""Docs with 1 and True."""
from typing import Literal

Kind = Literal[3]


def first(values: "list[int]", most: int = 7) -> int:
    """ü: columns are counted in bytes."""
    if "ü" in values and not values[0] < most:
        return max(1, most - 1)
    try:
        print(f"{most + 1}")
    except (ValueError, KeyError):
        raise
    return 0
'''
CHANGES = {
    ("and/or", "'ü' in values or not values[0] < most"),
    ("arithmetic", "most + 1"),
    ("comparison", "'ü' not in values"),
    ("comparison", "values[0] <= most"),
    ("constant", "8"),
    ("constant", "2"),
    ("constant", "1"),
    ("dropped raise", "pass"),
    ("dropped return", "pass"),
    ("removed not", "values[0] < most"),
    ("swapped call", "min(1, most - 1)"),
    ("wider except", "Exception"),
}


def test_the_changes_of_a_file() -> None:
    found = mutants_of("f.py", SOURCE)
    texts = [mutated(SOURCE, one) for one in found]
    assert len(set(texts)) == len(found) == 15
    assert {(one.kind, one.after) for one in found} == CHANGES


def tree(folder: Path) -> Path:
    """A small package with one test file, in a git repository."""
    files = {
        "src/rillflow/__init__.py": "",
        "src/rillflow/part.py": "def larger(a, b):\n    return a if a > b else b\n\n\ndef unused():\n    return 1\n",
        "tests/test_part.py": "from rillflow.part import larger\n\ndef test_larger():\n    assert larger(1, 2) == 2\n",
        "tests/test_broken.py": "def test_broken():\n    raise AssertionError\n",
        "tests/unit/test_borders.py": "def test_nothing(): pass\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=30)
    return folder


def test_a_sample_is_fixed_by_its_seed(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert sample(root, 2, 5) == sample(root, 2, 5)
    assert len(sample(root, 100, 0)) == 4


def test_a_recorded_mutant_is_found_again_by_its_text(tmp_path: Path) -> None:
    root = tree(tmp_path)
    path = root / "src/rillflow/part.py"
    (one,) = [one for one in sample(root, 100, 0) if one.kind == "comparison"]
    path.write_text("# a new line\n" + path.read_text())
    assert located(root, one) == replace(one, line=one.line + 1)
    path.write_text("def larger(a, b):\n    return max(a, b)\n")
    assert located(root, one) is None
    path.unlink()
    assert located(root, one) is None


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "copies").mkdir()
    return Copies(tree(tmp_path / "tree"), tmp_path / "copies", 1, 60.0)


def mutant(kind: str, line: int, before: str, after: str, column: int) -> Mutant:
    return Mutant("src/rillflow/part.py", line, kind, before, after, "", column)


DROPPED = mutant("dropped return", 2, "return a if a > b else b", "pass", 4)
UNUSED = mutant("constant", 6, "1", "2", 11)


@pytest.mark.slow
def test_what_becomes_of_a_mutant(copies: Copies, tmp_path: Path) -> None:
    before = (tmp_path / "tree/src/rillflow/part.py").read_text()
    killed = copies.run(DROPPED, ["tests/test_part.py"])
    assert (killed.status, killed.test, killed.tests) == ("killed", "tests/test_part.py::test_larger", 1)
    assert copies.run(UNUSED, ["tests/test_part.py"]).status == "survived"
    assert copies.run(UNUSED, []).status == "no test"
    assert copies.run(UNUSED, ["tests/test_broken.py"]).status == "unsteady", "it fails without the mutant too"
    assert (tmp_path / "tree/src/rillflow/part.py").read_text() == before
    assert (tmp_path / "copies/tree0/src/rillflow/part.py").read_text() == before


@pytest.mark.slow
def test_tests_that_do_not_end_are_a_timeout(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = mutant("dropped return", 2, "return a if a > b else b", "while True: pass", 4)
    monkeypatch.setattr(copies, "_seconds", 5.0)
    assert copies.run(forever, ["tests/test_part.py"]).status == "timeout"


def test_every_mutant_of_our_own_source_can_be_made() -> None:
    path = mutants.ROOT / "scripts" / "mutants.py"
    for one in mutants_of("scripts/mutants.py", path.read_text()):
        mutated(path.read_text(), one)
