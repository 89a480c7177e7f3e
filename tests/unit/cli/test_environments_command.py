"""`rillflow environments` and `rillflow play`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rillflow.agents.environments.registry import ENVIRONMENTS
from rillflow.cli.main import app

runner = CliRunner()


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


def test_what_is_wrong_is_said_without_a_traceback() -> None:
    for arguments, why in (
        (["play", "shop", "--option", "steps"], "must look like name=value"),
        (["play", "shopp"], "there is no environment"),
        (["environments", "--serve", "shopp"], "there is no environment"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code != 0
        assert why in result.output
        assert "Traceback" not in result.output
