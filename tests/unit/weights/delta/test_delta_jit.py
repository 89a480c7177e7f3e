"""Machine code that was kept is used again, but never that of other sources."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from numba import types
from numba.extending import is_jitted

from rillflow.storage.locks import locked
from rillflow.weights.delta import decode, encode, jit
from rillflow.weights.delta.ahead import Ahead
from rillflow.weights.delta.cpu import classes, reading, subsets, union, words, writing

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


def test_one_process_compiles_and_the_others_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernel_whole.py").write_text(KERNEL)
    (tmp_path / "kernel_part.py").write_text(PART.format(1))
    with ThreadPoolExecutor(1) as others:
        first = fresh(tmp_path)
        cache, context = first._cache, first.targetctx
        signature = (types.int64,)
        assert cache.load_overload(signature, context) is None, "it must be compiled"
        waiting = others.submit(fresh(tmp_path)._cache.load_overload, signature, context)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        first.compile(signature)
        assert waiting.result(60) is not None
    monkeypatch.setattr(jit, "_PATIENCE", 0.1)
    with locked(cache._lock_file):
        assert fresh(tmp_path)(1.0) == 2.0, "a lock that nobody lets go of holds up nobody for long"


def test_what_encodes_is_compiled_ahead() -> None:
    """All of it: nothing is left for the first real delta."""
    ahead = Ahead(torch.bfloat16, torch.device("cpu"))
    assert ahead.wait(300)
    loops = [loop for module in (words, classes, subsets, writing) for loop in vars(module).values() if is_jitted(loop)]
    before = [len(loop.signatures) for loop in loops]
    assert any(before)
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(100_003, generator=generator).bfloat16()
    for share in (0.001, 0.9):
        changed = torch.rand(len(base), generator=generator) < share
        encode(base, torch.where(changed, base * 1.5, base))
    assert [len(loop.signatures) for loop in loops] == before


def test_what_decodes_is_compiled_ahead() -> None:
    ahead = Ahead(torch.bfloat16, torch.device("cpu"), reads=True)
    assert ahead.wait(300)
    loops = [loop for module in (reading, words, classes, union) for loop in vars(module).values() if is_jitted(loop)]
    before = [len(loop.signatures) for loop in loops]
    assert any(before)
    base = torch.randn(100_003, generator=torch.Generator().manual_seed(1)).bfloat16()
    new = base.clone()
    new[::100] *= 1.5
    index_K = decode(base, encode(base, new).data).index_K
    assert index_K is not None
    union.union(index_K.numpy(), index_K.numpy())
    assert [len(loop.signatures) for loop in loops] == before


def test_what_cannot_be_prepared_is_left_to_who_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    assert Ahead(torch.int64, torch.device("cpu")).wait(60)
    assert "could not be prepared" in caplog.text


def test_code_is_of_the_format_that_it_was_compiled_with(tmp_path: Path) -> None:
    """Constants of the folder above are compiled into it."""
    named = {name for name, *_ in jit._state(tmp_path)}
    assert {"jit.py", "format.py"} <= named


def test_without_a_folder_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(jit._Kept, "__init__", refuse)
    assert jit.compiled(lambda number: number + 1)(1) == 2
