"""Every command that takes a run: on a folder that is missing, foreign or of a run that has ended, it says so in one
line, with what to do, and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder

# The arguments that a command needs beside the run; {run} stands for it where it is not the first argument.
BESIDE = {
    "export": ("out",),
    "label": ("{run}", "--out", "rows.jsonl"),
    "retire": ("{run}", "node"),
    "fit": ("--resume", "{run}"),
    "try": ("{run}",),
}
SERVED = ("nodes", "retire", "unit", "engine", "rollout", "trainer", "maintain")  # they ask or join a live run


def commands() -> list[str]:
    """Every command with a RUN among its arguments, and those that take one under another name."""
    group: Any = typer.main.get_command(app)
    found = [
        name
        for name, command in group.commands.items()
        if any("RUN" in str(parameter.metavar or "") for parameter in command.params)
    ]
    return sorted({*found, "retire", "try"} - {"leakage"})


def call(command: str, run: str | Path) -> tuple[int, list[str]]:
    words = BESIDE.get(command, ("{run}",))
    words = words if "{run}" in words else ("{run}", *words)
    result = CliRunner().invoke(app, [command, *(word.format(run=run) for word in words)], env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.splitlines()


@pytest.mark.parametrize("command", commands())
@pytest.mark.parametrize("kind", ["missing", "foreign"])
def test_what_is_not_a_run_is_named_with_what_to_do(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "foreign":
        (tmp_path / "mine").mkdir()
    if (command, kind) == ("top", "foreign"):
        assert call(command, "mine") == (0, ["no runs yet"])  # a folder in which runs may come
        return
    code, lines = call(command, "mine")
    assert code != 0
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ")
    assert "mine" in lines[0]
    assert lines[1].startswith("what to do: ")


@pytest.fixture
def ended(tmp_path: Path) -> RunFolder:
    """The folder of a run that has finished, whose service listens no more."""
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    folder.publish_endpoint("dataflow", "http://127.0.0.1:9")
    folder.set_state("finished", "done")
    return folder


@pytest.mark.parametrize("command", SERVED)
def test_a_run_that_has_finished_is_not_asked_or_joined(command: str, ended: RunFolder) -> None:
    code, lines = call(command, ended.root)
    assert code == 2
    assert lines == [
        f"error: {ended.root} has finished (done): none of its processes run any more",
        f"what to do: `rillflow status {ended.root}` shows what it came to",
    ]


@pytest.mark.parametrize(
    ("state", "said", "todo"),
    [
        ("stopped", "has stopped (why)", "`rillflow resume"),
        ("failed", "has failed (why)", "`rillflow resume"),
        ("running", "does not answer: its processes have died, or run on another machine", "`rillflow resume"),
    ],
)
def test_a_run_without_processes_says_how_to_go_on(state: str, said: str, todo: str, ended: RunFolder) -> None:
    ended.set_state(state, "why")  # type: ignore[arg-type]
    code, lines = call("nodes", ended.root)
    assert code == 2
    assert lines[0] == f"error: {ended.root} {said}"
    assert todo in lines[1]


def test_a_run_that_runs_and_does_not_answer_yet_is_not_called_dead(ended: RunFolder) -> None:
    ended.set_state("running")
    with ended.locked():
        code, lines = call("nodes", ended.root)
    assert (code, lines[0]) == (2, f"error: {ended.root} does not answer yet")
