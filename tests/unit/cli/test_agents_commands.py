"""`rillflow tools`, `environments` and `play`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rillflow.agents.environments.registry import ENVIRONMENTS
from rillflow.cli.main import app

runner = CliRunner()


def mine(folder: Path, tools: str, name: str = "mine") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f"extends: quickstart\nname: mine\ntools: {tools}\n")
    return str(path)


def test_tools_are_listed_with_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def weigh(box: str, times: int = 1) -> float:\n    """Weigh [it].\n\n    Args:\n        box: which\n    """\n'
    )
    path = mine(tmp_path, "[calculator, mine.py:weigh]")
    result = runner.invoke(app, ["tools", path])
    assert result.exit_code == 0, result.output
    assert "calculator" in result.output
    assert "weigh  Weigh [it]." in result.output
    assert "box (string)  which" in result.output
    assert "times (integer, optional)" in result.output
    schemas = json.loads(runner.invoke(app, ["tools", path, "--json"]).output)
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "weigh"]


def test_wrong_tools_are_named_without_a_traceback(tmp_path: Path) -> None:
    for arguments, why in (
        (["tools", "quickstart"], "names no tools"),
        (["tools", mine(tmp_path, "[calculater]")], "did you mean 'calculator'"),
        (["tools", "mcp_stdio", "--port", "8000"], "--serve http"),
        (["run", mine(tmp_path, "[{name: calculator, options: {depth: 1}}]", "other")], "its options are: none"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 2
        assert why in result.output
        assert "Traceback" not in result.output


def test_every_environment_is_listed_with_what_it_needs() -> None:
    result = runner.invoke(app, ["environments"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in ENVIRONMENTS)
    assert "[" not in ENVIRONMENTS["shop"].needs, "it needs nothing that is not installed"


@pytest.mark.parametrize("name", ["shop", "household", "tau"])
def test_the_gold_player_wins(name: str) -> None:
    result = runner.invoke(app, ["play", name, "--agent", "gold", "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "reward 1, won"


def test_a_seed_is_a_world_and_what_is_drawn_in_it() -> None:
    once, again, other = (
        runner.invoke(app, ["play", "household", "--agent", "random", "--seed", seed]).output for seed in "112"
    )
    assert once == again
    assert once != other
    assert once.splitlines()[-1].startswith("reward ")


def test_a_person_plays_until_the_input_ends() -> None:
    result = runner.invoke(app, ["play", "shop"], input="dance\n")
    assert "> dance" in result.output
    assert "Say search[words] or click[button]." in result.output
    assert result.exit_code == 1


def test_options_are_the_environments() -> None:
    result = runner.invoke(app, ["play", "shop", "--agent", "random", "--option", "steps=2"])
    assert result.output.count("> look") == 2


def test_wrong_environments_are_named_without_a_traceback() -> None:
    for arguments, why in (
        (["play", "shop", "--option", "steps"], "must look like name=value"),
        (["play", "shopp"], "there is no environment"),
        (["environments", "--serve", "shopp"], "there is no environment"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code != 0
        assert why in result.output
        assert "Traceback" not in result.output
