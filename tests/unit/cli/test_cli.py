"""The command line: help for everything, and clear refusals before anything is started."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import rillflow
from rillflow.cli.main import app
from rillflow.config import load_recipe, recipes, write_resolved
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import GIVE_UP

runner = CliRunner()
COMMANDS = ["run", "resume", "audit", "recipes", "version", "dataflow", "rollout", "trainer"]


def test_help_lists_every_command() -> None:
    text = runner.invoke(app, ["--help"]).output
    for command in COMMANDS:
        assert command in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version() -> None:
    assert f"rillflow {rillflow.__version__}" in runner.invoke(app, ["version"]).output


def test_dry_run_prints_the_resolved_recipe() -> None:
    result = runner.invoke(app, ["run", "quickstart", "seed=42", "--dry-run"])
    assert result.exit_code == 0
    assert "seed: 42" in result.output


def recipe(folder: Path, **changes: str) -> str:
    lines = {
        "name": "mine",
        "policies": "{agent: {model: tiny}}",
        "workflow": "play.py:play",
        "data": "{prompts: {path: prompts.jsonl}}",
    } | changes
    (folder / "play.py").write_text("async def play(episode):\n    return 1.0\n\ndef not_async(episode): ...\n")
    (folder / "prompts.jsonl").write_text('{"question": "?"}\n')
    path = folder / "mine.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in lines.items()))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sed": "1"}, "did you mean 'seed'"),
        ({"seed": "many"}, "valid integer"),
        ({"workflow": "absent.py:play"}, "absent.py"),
        ({"workflow": "play.py:pley"}, "has no 'pley'"),
        ({"workflow": "play.py:not_async"}, "not an async function"),
        ({"data": "{prompts: {path: absent.jsonl}}"}, "absent.jsonl"),
        ({"data": "{prompts: {path: empty.jsonl}}"}, "no prompts"),
        ({"data": "{prompts: {path: broken.jsonl}}"}, "line 2"),
        ({"policies": "{agent: {model: ./absent-model}}"}, "absent-model"),
        ({"trainer": "{kl: {reference: ./absent-model}}"}, "absent-model"),
        ({"trainer": "{algorithm: ppo, critic: {model: ./absent-model}}"}, "absent-model"),
    ],
)
def test_bad_recipes_are_refused_before_anything_starts(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"a": \n')
    result = runner.invoke(app, ["run", recipe(tmp_path, **changes), "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "what to do" in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["resume", "audit", "dataflow", "rollout"])
def test_a_folder_that_is_no_run(command: str, tmp_path: Path) -> None:
    result = runner.invoke(app, [command, str(tmp_path)])
    assert result.exit_code == 2
    assert "is not a run folder" in result.output


def run_folder_of(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe(recipe(tmp_path)), tmp_path / "runs")


def test_resume_looks_before_it_starts_anything(tmp_path: Path) -> None:
    folder = run_folder_of(tmp_path)
    (tmp_path / "play.py").unlink()
    result = runner.invoke(app, ["resume", str(folder.root)])
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.split())
    assert folder.state()["state"] == "new"


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr("rillflow.cli.run.run_folder", lambda folder, where, resume: started.append(folder.root) or 0)
    folder = run_folder_of(tmp_path)
    folder.set_state("finished", "done")
    folder.metrics.write_text('{"seq": 1, "policy": "agent", "step": 1, "version": 1}\n')
    write_resolved(load_recipe(recipe(tmp_path), ["trainer.steps=1"]), folder.root / "recipe.yaml")
    result = runner.invoke(app, ["resume", str(folder.root)])
    assert result.exit_code == 0
    assert "nothing to resume" in result.output
    assert "trainer.steps" in result.output
    assert not started
    write_resolved(load_recipe(recipe(tmp_path), ["trainer.steps=2"]), folder.root / "recipe.yaml")
    assert runner.invoke(app, ["resume", str(folder.root)]).exit_code == 0
    assert started == [folder.root]


def test_a_run_that_reached_its_target_goes_on_when_it_is_given_a_higher_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr("rillflow.cli.run.run_folder", lambda folder, where, resume: started.append(folder.root) or 0)

    def resume(*changes: str) -> str:
        write_resolved(load_recipe("quickstart", [*changes, "trainer.steps=3"]), folder.root / "recipe.yaml")
        result = runner.invoke(app, ["resume", str(folder.root)])
        assert result.exit_code == 0
        return result.output

    folder = RunFolder.create(load_recipe("quickstart"), tmp_path / "runs")
    folder.set_state("finished", "target reached")
    lines = [
        {"seq": 1, "event": "evaluation", "step": 0, "version": 0, "reward": 0.95, "failed": 1},
        {"seq": 2, "policy": "agent", "step": 1, "version": 1},
        {"seq": 3, "event": "evaluation", "step": 1, "version": 1, "reward": 0.9, "failed": 0},
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = resume("evaluation.target=0.9")
    assert "has finished (target reached): nothing to resume" in output
    assert "raise evaluation.target in" in output
    assert not started
    resume("evaluation.target=0.94")
    resume("evaluation.target=null")
    assert started == [folder.root, folder.root]


@pytest.mark.parametrize("command", ["dataflow", "rollout", "trainer"])
def test_a_role_that_can_never_work_says_so_to_its_supervisor(command: str, tmp_path: Path) -> None:
    folder = run_folder_of(tmp_path)
    (folder.root / "recipe.yaml").write_text("nonsense: 1\n")
    result = runner.invoke(app, [command, str(folder.root)])
    assert result.exit_code == GIVE_UP, result.output
    assert "unknown key" in result.output


def test_a_trainer_needs_no_policy_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    monkeypatch.setattr("rillflow.runtime.roles.trainer_role", lambda folder, policy, **_: trained.append(policy))
    assert runner.invoke(app, ["trainer", str(run_folder_of(tmp_path).root)]).exit_code == 0
    assert trained == ["agent"]


def test_no_option_is_named_as_its_value() -> None:
    """typer 0.27 takes `--engine ENGINE` for an argument."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [(name, one) for name, command in commands.items() for one in command.params if one.opts[0][:1] == "-"]
    assert len(options) > 50
    assert not [(name, one.name) for name, one in options if (one.metavar or "").lower() == one.name]


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = str(run_folder_of(tmp_path).root)
    assert "one of: agent" in runner.invoke(app, ["trainer", folder, "--policy", "nobody"]).output
    result = runner.invoke(app, ["rollout", folder, "--name", "../x"])
    assert result.exit_code == 2
    assert "is not a name" in result.output


def test_a_second_supervisor_leaves_no_trace(tmp_path: Path) -> None:
    folder = run_folder_of(tmp_path)
    with folder.locked():
        result = runner.invoke(app, ["resume", str(folder.root)])
    assert result.exit_code == 2
    assert "another process is running" in result.output
    assert not (folder.root / "tensorboard").exists()


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("graph", "the recipe's first"),
        ("export", "the run's first"),
        ("trainer", "the run's first"),
        ("trainer", "all, on this machine"),
        ("trainer", "the recipe's"),
    ],
)
def test_help_says_what_happens_without_an_option(command: str, default: str) -> None:
    output = runner.invoke(app, [command, "--help"]).output
    assert default in " ".join(output.replace("│", " ").split())


def test_the_shipped_recipes_have_a_line_each_and_fit_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = runner.invoke(app, ["recipes"]).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert sorted(line.split()[0] for line in lines if line.split()[:1] in [[name] for name in recipes()]) == sorted(
        recipes()
    )
    groups = [list(group) for empty, group in groupby(lines, key=lambda line: not line.strip()) if not empty]
    assert all(len(group) <= 24 for group in groups), "each fits a screen"
    (basics,) = (group for group in groups if any(line.startswith("quickstart ") for line in group))
    assert basics[0].startswith("rillflow run: the quickstart")
    (supervised,) = (group for group in groups if any(line.startswith("sft ") for line in group))
    assert supervised[0].startswith("rillflow fit: ")


def test_one_recipe_is_shown_whole() -> None:
    shown = runner.invoke(app, ["recipes", "quickstart"]).output
    assert recipes()["quickstart"].read_text() in shown
    assert "start it with `rillflow run quickstart`" in shown
    unknown = runner.invoke(app, ["recipes", "quikstart"])
    assert unknown.exit_code == 2
    assert "did you mean 'quickstart'" in unknown.output


def test_the_code_of_a_command_is_imported_when_it_is_asked_for() -> None:
    program = "import sys, rillflow.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "rillflow.cli.watching" in loaded
    assert not loaded & {"rillflow.config", "rillflow.clients", "rillflow.wire", "rillflow.observe", "numpy", "asyncio"}
