"""The sandbox, and the plain bubblewrap that it is measured against, run wherever Python is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.sandbox import bwrap_line
from rillflow.agents.sandbox import Sandbox, SandboxConfig
from rillflow.agents.sandbox.isolation import base_python

pytestmark = pytest.mark.needs("bubblewrap")


def _linked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use an installation that is known by a link, as pyenv's and Homebrew's are."""
    installation, program = base_python()
    (folder / "python").symlink_to(installation)
    monkeypatch.setattr(sys, "base_prefix", str(folder / "python"))
    monkeypatch.setattr(sys, "executable", str(folder / "python" / program.relative_to(installation)))


def _copied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use a virtual environment with a copy of the program, as `venv --copies` makes it."""
    shutil.copy(base_python()[1], folder / "python")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.mark.parametrize("change", [_linked, _copied])
def test_programs_run_with_any_interpreter(change, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = base_python()
    change(monkeypatch, tmp_path)
    assert base_python() == expected
    with Sandbox(SandboxConfig(pool=1)) as opened:
        assert opened.run_sync("print(1)").stdout == "1\n"
    done = subprocess.run([*bwrap_line(), "-c", "print(1)"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1\n", done.stderr


def test_plain_bubblewrap_shows_an_installation_below_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    done = subprocess.run(bwrap_line(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ran\n", done.stderr
