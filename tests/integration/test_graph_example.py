"""Runs the example of the page "Step graphs": a reward and a loss of one's own.

The short form runs it for three steps, the long one as it is written, and shows that it learns.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import Cli
from soak import SOAK, repetitions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "graphs.md"
FILE = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', re.DOTALL)
COMMAND = re.compile(r"```console\n(rillflow .*?)\n```", re.DOTALL)

SHORT = ["trainer.steps=3", "trainer.batch_groups=2", "data.heldout.arguments.count=8"]


@pytest.mark.slow
@pytest.mark.soak
def test_the_example_as_it_is_written(cli: Cli) -> None:
    text = PAGE.read_text()
    files = dict(FILE.findall(text))
    assert set(files) == {"rewards.py", "losses.py", "short.yaml"}
    for name, content in files.items():
        (cli.cwd / name).write_text(content)
    (command,) = COMMAND.findall(text)
    run = cli.run(*shlex.split(command)[1:], *([] if SOAK else SHORT), seconds=600)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("node_shorter_seconds" in line for line in lines) == repetitions(3, 12)
    first, *_, last = json.loads((run.folder / "summary.json").read_text())["heldout"]
    assert (first["version"], last["version"]) == (0, repetitions(3, 12))
    if SOAK:
        assert last["reward"] > first["reward"] + 0.15
