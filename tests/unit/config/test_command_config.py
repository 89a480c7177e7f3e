"""A recipe has exactly one of a workflow, a command and agents from outside; a command finds its files anywhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from rillflow.config import load_recipe, recipes
from rillflow.errors import ConfigError

BASE = {
    "name": "mine",
    "policies": {"agent": {"model": "tiny"}},
    "rewards": "agent",
    "data": {"prompts": {"generator": "rillflow.examples.stockroom:prompts"}},
}


def written(folder: Path, **keys: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(BASE | keys))
    return str(path)


@pytest.mark.parametrize("form", ["short", "long"])
def test_files_beside_the_recipe_are_found_from_any_folder(tmp_path: Path, form: str) -> None:
    (tmp_path / "my agent.py").write_text("")
    (tmp_path / "work").mkdir()
    run = "python 'my agent.py' --model x"
    command = run if form == "short" else {"run": run, "folder": "work", "environment": {"path": "as-it-is"}}
    loaded = load_recipe(written(tmp_path, command=command)).command
    assert loaded is not None
    assert loaded.run == f"python '{tmp_path / 'my agent.py'}' --model x"
    if form == "long":
        assert loaded.folder == str(tmp_path / "work")
        assert loaded.environment == {"path": "as-it-is"}


def test_other_words_stay_as_they_were_written(tmp_path: Path) -> None:
    command = "node agent.js  --quiet"
    loaded = load_recipe(written(tmp_path, command=command)).command
    assert loaded is not None
    assert loaded.run == command


@pytest.mark.parametrize("keys", [{}, {"outside": True, "command": "true"}, {"workflow": "a:b", "command": "true"}])
def test_exactly_one_plays(tmp_path: Path, keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="exactly one of"):
        load_recipe(written(tmp_path, **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"command": "true", "rewards": "recipe"}, "nothing rewards the command"),
        ({"command": "true", "reward": "math", "rewards": "agent"}, "exclude each other"),
        ({"workflow": "a:b", "reward": "math", "rewards": "agent"}, "exclude each other"),
        ({"command": "true", "rewards": "everybody"}, "rewards"),
        (
            {"command": "true", "rewards": "recipe", "reward": "math", "trainer": {"step_rewards": "own"}},
            "nothing would reward single answers",
        ),
        (
            {
                "workflow": "a:b",
                "policies": {
                    "a": {"model": "tiny", "trainer": {"step_rewards": "own"}},
                    "b": {"model": "tiny", "trains_on": ["a", "b"]},
                },
            },
            "trainer.step_rewards differs among a, b",
        ),
        ({"command": "true", "ends": {"agent_eror": 0}}, "'agent_eror' is not an end of an episode"),
        ({"command": "true", "ends": {"timeout.5": 0}}, "'timeout.5' is not an end of an episode"),
        ({"command": "true", "ends": {"timeout": "never"}}, "ends.timeout"),
        ({"command": "true", "ends": {"timeout": float("nan")}}, "ends.timeout"),
        (
            {"workflow": "a:b", "trainer": {"step_rewards": "own"}, "ends": {"timeout": 0}},
            "nothing would read the rewards in `ends`",
        ),
    ],
)
def test_rewards_that_nobody_gives_or_reads_are_refused(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(written(tmp_path, **keys))


@pytest.mark.parametrize(
    ("keys", "givers"),
    [
        ({"command": "true"}, "agent"),
        ({"command": "true", "rewards": "recipe", "rollout": {"late_rewards": 60}}, "run"),
        ({"command": "true", "rewards": "recipe", "reward": "math"}, "nobody"),
        ({"outside": True, "rewards": "recipe"}, "run"),
    ],
)
def test_who_gives_rewards_over_http(tmp_path: Path, keys: dict[str, object], givers: str) -> None:
    assert load_recipe(written(tmp_path, **keys)).reward_givers == givers


def test_ends_have_rewards_or_are_retried(tmp_path: Path) -> None:
    ends = {"agent_error": 0, "agent_error.-9": "retry", "workflow_error.ValueError": -1.5, "timeout": 1}
    loaded = load_recipe(written(tmp_path, command="true", ends=ends)).ends
    assert loaded == ends
    assert [type(worth) for worth in loaded.values()] == [float, str, float, float]


@pytest.mark.parametrize("name", ["command_agent", "outside_agent"])
def test_the_shipped_recipes_say_who_plays(name: str) -> None:
    assert name in recipes()
    recipe = load_recipe(name)
    assert recipe.workflow is None
    assert (recipe.command is not None, recipe.outside) == (name == "command_agent", name == "outside_agent")


FRAMEWORKS = Path(__file__).parents[3] / "recipes" / "frameworks"


@pytest.mark.parametrize(
    "path", sorted({*FRAMEWORKS.glob("*.yaml")} - {FRAMEWORKS / "base.yaml"}), ids=lambda p: p.stem
)
def test_the_recipes_of_frameworks_find_their_agents_from_any_folder(path: Path) -> None:
    """Their environments need not be there to look at them."""
    recipe = load_recipe(str(path))
    assert recipe.ends == {"agent_error": 0.0}
    if recipe.command is None:
        assert recipe.outside
        return
    interpreter, script = shlex.split(recipe.command.run)
    assert ".venv-agents" in interpreter
    assert Path(script) == FRAMEWORKS / f"{path.stem}_agent.py"


def test_a_word_may_be_longer_than_a_files_name(tmp_path: Path) -> None:
    script = "echo hello; " * 50
    command = load_recipe(written(tmp_path, command=f"sh -c '{script}'")).command
    assert command is not None
    assert shlex.split(command.run) == ["sh", "-c", script]


def test_text_may_begin_as_a_home_does(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, command="sh", description="~50 steps")).description == "~50 steps"


@pytest.mark.parametrize("given", ["path=foo", "run=foo", "FLAG='1'", 'FLAG="1e3"'])
def test_variables_can_be_set_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """A quoted value is text and is not made an absolute path."""
    (tmp_path / "foo").write_text("")
    monkeypatch.chdir(tmp_path)
    command = load_recipe(written(tmp_path, command={"run": "sh"}), [f"command.environment.{given}"]).command
    name, _, value = given.partition("=")
    assert command is not None
    assert command.environment == {name: value.strip("'\"")}


def test_the_interpreter_of_a_virtual_environment_stays_what_the_recipe_names(tmp_path: Path) -> None:
    """It is a link to the interpreter that it was made with, which has none of its packages."""
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    (tmp_path / "agent.py").write_text("")
    tools = [{"mcp": {"command": "venv/bin/python agent.py"}}]
    loaded = load_recipe(written(tmp_path, command="./venv/bin/python agent.py", tools=tools))
    assert loaded.command is not None
    assert loaded.tools[0].mcp is not None
    for found in (loaded.command.run, loaded.tools[0].mcp.command):
        assert shlex.split(str(found)) == [str(venv / "python"), str(tmp_path / "agent.py")]
