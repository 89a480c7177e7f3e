"""A disk that fills up during a run, for real: a clear message, nothing acknowledged lost, and resume goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Cli

RUN = [
    "trainer.steps=12",
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "runtime.restarts=1",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
]


def mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True, capture_output=True, timeout=10)


@pytest.fixture
def small_disk(cli: Cli) -> Iterator[Path]:
    disk = cli.cwd / "runs"
    disk.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=14m", "tmpfs", str(disk))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


@pytest.mark.slow
def test_a_full_disk(cli: Cli, small_disk: Path) -> None:
    run = cli.run("run", "quickstart", *RUN, code=2)
    assert "no space left" in run.output()
    assert "rillflow resume" in run.output()
    cli.run("audit", str(run.folder))

    mount("-o", "remount,size=200m", str(small_disk))
    cli.run("resume", str(run.folder))
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 12
    cli.run("audit", str(run.folder))
