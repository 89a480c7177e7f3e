"""Machine code that was kept is used again, but never that of other sources."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from rillflow.weights.delta import jit

KERNEL = """
from rillflow.weights.delta.jit import compiled
from kernel_part import part

@compiled
def kernel(number):
    return part(number)
"""
PART = """
from rillflow.weights.delta.jit import inlined

@inlined
def part(number):
    return number + {}
"""


def fresh(folder: Path) -> object:
    """The kernel as another process would get it."""
    importlib.invalidate_caches()
    jit._state.cache_clear()
    for name in ("kernel_whole", "kernel_part"):
        sys.modules.pop(name, None)
    return importlib.import_module("kernel_whole").kernel


def test_a_change_of_another_file_of_the_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernel_whole.py").write_text(KERNEL)
    (tmp_path / "kernel_part.py").write_text(PART.format(1))
    kernel = fresh(tmp_path)
    assert kernel(1) == 2
    kernel = fresh(tmp_path)
    assert kernel(1) == 2
    assert sum(kernel.stats.cache_hits.values()) == 1
    (tmp_path / "kernel_part.py").write_text(PART.format(20))
    assert fresh(tmp_path)(1) == 21


def test_without_a_folder_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(jit._Kept, "__init__", refuse)
    assert jit.compiled(lambda number: number + 1)(1) == 2
