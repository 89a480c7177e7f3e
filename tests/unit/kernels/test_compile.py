"""Machine code is kept and used again, but never that of other sources."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.extending import is_jitted

from rillflow.kernels import compile as module
from rillflow.kernels.compile import compiled, digest, one_compiles
from rillflow.kernels.delta import classes, reading, words, writing
from rillflow.weights.delta import Ahead, decode, encode

KERNEL = """
from rillflow.kernels import compile

@compile.compiled
def kernel(number):
    return number + 1

print(kernel(1), sum(kernel.stats.cache_hits.values()))
"""


def in_another_process(folder: Path) -> str:
    (folder / "kernel.py").write_text(KERNEL)
    environment = {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": ":".join(sys.path), "HOME": str(folder)}
    done = subprocess.run([sys.executable, folder / "kernel.py"], env=environment, capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_machine_code_is_used_by_the_next_process(tmp_path: Path) -> None:
    assert [in_another_process(tmp_path) for _ in range(2)] == ["2 0", "2 1"]


def test_every_source_of_the_package_counts(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one.py").write_text("1")
    (tmp_path / "below" / "two.py").write_text("2")
    before = digest(tmp_path)
    (tmp_path / "below" / "two.py").write_text("3")
    assert digest(tmp_path) != before
    folder = module._folder()
    assert folder is not None
    assert folder.name == f"kernels-{digest(Path(module.__file__).parent)}"


def test_threads_do_not_take_the_folder_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def slow(**options: Any) -> Callable[[Any], Any]:
        seen.append(module._config.CACHE_DIR)
        time.sleep(0.02 * len(seen))  # the others begin and end at different times
        seen.append(module._config.CACHE_DIR)
        return lambda function: function

    before = module._config.CACHE_DIR
    monkeypatch.setattr(module.numba, "njit", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compiled, [lambda number: number] * 4))
    assert seen == [str(module._folder())] * 8
    assert before == module._config.CACHE_DIR


def test_without_a_folder_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_folder", lambda: None)
    assert compiled(lambda number: number + 1)(1) == 2
    with one_compiles():
        pass


def test_a_lock_that_is_never_released_delays_a_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    with one_compiles():
        monkeypatch.setattr(module, "_PATIENCE", 0.1)
        with one_compiles():
            entered.append(True)
    assert entered


def signatures(*modules: Any) -> Callable[[], list[int]]:
    loops = [loop for one in modules for loop in vars(one).values() if is_jitted(loop)]
    return lambda: [len(loop.signatures) for loop in loops]


def test_the_encoder_is_compiled_ahead() -> None:
    """Nothing is left to be compiled for the first real delta."""
    assert Ahead(torch.bfloat16, torch.device("cpu")).wait(300)
    known = signatures(words, classes, writing)
    before = known()
    assert any(before)
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(100_003, generator=generator).bfloat16()
    for share in (0.001, 0.9):
        changed = torch.rand(len(base), generator=generator) < share
        encode(base, torch.where(changed, base * 1.5, base))
    assert known() == before


def test_the_decoder_is_compiled_ahead() -> None:
    assert Ahead(torch.bfloat16, torch.device("cpu"), reads=True).wait(300)
    known = signatures(reading, words, classes)
    before = known()
    assert any(before)
    base = torch.randn(100_003, generator=torch.Generator().manual_seed(1)).bfloat16()
    new = base.clone()
    new[::100] *= 1.5
    index_K = decode(base, encode(base, new).data).index_K
    assert index_K is not None
    words.union(index_K.numpy(), index_K.numpy())
    assert known() == before


def test_a_failed_preparation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert Ahead(torch.int64, torch.device("cpu")).wait(60)
    assert "could not be prepared" in caplog.text
