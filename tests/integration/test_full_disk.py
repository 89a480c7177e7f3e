"""A disk that fills up during a run, for real: a clear message, nothing acknowledged lost, and resume goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Cli
from needs import require
from small_disk import mount, small_disk

RUN = [
    "trainer.steps=12",
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "runtime.restarts=1",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
]


@pytest.fixture
def disk(cli: Cli) -> Iterator[Path]:
    require("mounts")
    with small_disk(cli.cwd / "runs", "14m") as disk:
        yield disk


@pytest.mark.slow
def test_a_full_disk(cli: Cli, disk: Path) -> None:
    run = cli.run("run", "stockroom", *RUN, code=2)
    assert "no space left" in run.output()
    assert "rillflow resume" in run.output()
    cli.run("audit", str(run.folder))

    mount("-o", "remount,size=200m", str(disk))
    cli.run("resume", str(run.folder))
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 12
    cli.run("audit", str(run.folder))
