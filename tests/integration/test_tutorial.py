"""Runs exactly the page "Train your own agent in 20 lines"."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import Cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
FILE = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', re.DOTALL)
COMMAND = re.compile(r"```console\n(rillflow .*?)\n```", re.DOTALL)


@pytest.mark.slow
def test_the_tutorial_as_it_is_written(cli: Cli) -> None:
    text = PAGE.read_text()
    files = dict(FILE.findall(text))
    assert set(files) == {"play.py", "prompts.jsonl", "colours.yaml"}
    code_lines = [
        line for name in files if name != "prompts.jsonl" for line in files[name].splitlines() if line.strip()
    ]
    assert len(code_lines) <= 22
    for name, content in files.items():
        (cli.cwd / name).write_text(content)
    tried, command = COMMAND.findall(text)
    episode = cli.run(*shlex.split(tried)[1:]).output()
    assert "user       Say a colour." in episode
    assert "\nreward     " in episode
    run = cli.run(*shlex.split(command)[1:])
    first, last = json.loads((run.folder / "summary.json").read_text())["heldout"]
    assert first["reward"] < 0.4
    assert last["reward"] > 0.7
