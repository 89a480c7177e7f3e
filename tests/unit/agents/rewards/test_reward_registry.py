"""Rewards by name: the forms in a recipe, and their results."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rillflow.agents.rewards.registry import REWARDS, load_reward, make_reward, prepare_reward
from rillflow.cli.main import app
from rillflow.config import RewardConfig, load_recipe
from rillflow.errors import ConfigError, RewardError

OWN = """
class Near:
    def __init__(self, by=1.0):
        if by <= 0:
            raise ValueError("by must be above 0")
        self.by = by

    def __call__(self, payload, answer):
        return max(0.0, 1 - abs(float(answer) - payload["answer"]) / self.by)

def short(payload, answer, most=3):
    return len(answer) <= most

async def later(payload, answer):
    return 2

def broken(payload, answer):
    return float("nan")

def grouped(answer, group):
    return 1.0

def odd(payload, answer, words):
    return 1.0

number = 4
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


def of(*parts: Any) -> Any:
    return load_reward([RewardConfig.model_validate(part) for part in parts])


async def test_parts_are_weighted_added_and_told(own: str) -> None:
    reward = of(
        {"name": "exact_match", "weight": 2}, {f"{own}:short": {"most": 1}}, {"name": f"{own}:later", "weight": -1}
    )
    right, wrong = await reward({"answer": "4"}, "4"), await reward({"answer": "4"}, "five")
    assert (right, right.parts) == (1.0, {"exact_match": 1.0, "short": 1.0, "later": 2.0})
    assert (wrong, wrong.parts) == (-2.0, {"exact_match": 0.0, "short": 0.0, "later": 2.0})


async def test_parts_that_are_called_alike_have_numbers() -> None:
    reward = of({"format": {"json_keys": []}}, {"format": {"tags": ["a"]}})
    assert (await reward({}, "{}")).parts == {"format_0": 1.0, "format_1": 0.0}


async def test_a_class_is_made_with_its_options(own: str) -> None:
    assert await of({f"{own}:Near": {"by": 4}})({"answer": 4}, "3") == 0.75


async def test_a_part_that_fails_leaves_no_reward(own: str) -> None:
    with pytest.raises(RewardError, match="broken is nan"):
        await of("exact_match", f"{own}:broken")({"answer": "4"}, "4")
    with pytest.raises(RewardError):
        await of(f"{own}:later", "exact_match")({}, "4")


def test_a_function_alone_stays_as_it_is(own: str) -> None:
    assert load_reward(f"{own}:short")({}, "four", most=4) is True


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("exactmatch", "did you mean 'exact_match'"),
        ({"f1": {"insid": "answer"}}, "unknown key insid; did you mean 'inside'"),
        ({"length": {"longest": 0, "margin": 1}}, "longest"),
        ({"{own}:short": {"least": 3}}, "unexpected keyword argument 'least'"),
        ({"{own}:Near": {"by": 0}}, "by must be above 0"),
        ("{own}:number", "is not a function"),
        ("{own}:grouped", "its parameter 'answer' belongs to one episode"),
        ("{own}:odd", "its parameter 'words' names nothing that it can be given"),
        ({"{own}:short": {"answer": "4"}}, "its option 'answer' has the name of an argument that every reward gets"),
        ("{own}:nobody", "has no 'nobody'"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_played(own: str, part: Any, said: str) -> None:
    if isinstance(part, dict):
        part = {name.format(own=own): options for name, options in part.items()}
    with pytest.raises(ConfigError) as error:
        of(part.format(own=own) if isinstance(part, str) else part)
    assert said in str(error.value)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty list"):
        load_reward([])


def test_a_recipe_names_them(own: str) -> None:
    recipe = load_recipe("quickstart", [f"reward=[exact_match, {{'{own}:short': {{most: 1}}}}]"])
    assert isinstance(recipe.reward, list)
    assert asyncio.run(load_reward(recipe.reward)({"answer": "4"}, "4")) == 2.0


@pytest.mark.needs("reasoning-gym")
async def test_reasoning_gyms_own_scores() -> None:
    entry = {"question": "2 + 2 =", "answer": "4", "metadata": {}, "source_dataset": "letter_counting"}
    await prepare_reward(make_reward("reasoning_gym"))
    assert await make_reward("reasoning_gym")(entry, " 4 ") == 1.0
    assert await make_reward("reasoning_gym")(entry, "it is 4") == pytest.approx(1 / 7)
    assert await make_reward("reasoning_gym", strict=True)(entry, "it is 4") == 0.0
    assert await make_reward("reasoning_gym", strict=True, inside="answer")(entry, "it is <answer>4</answer>") == 1.0
    assert await make_reward("reasoning_gym", strict=True, last_number=True)(entry, "2 + 2 = 4.") == 1.0
    assert await make_reward("reasoning_gym")(entry, None) == 0.0
    grid = entry | {"source_dataset": "arc_agi", "answer": "1 2", "metadata": {"output": [[1, 2]]}}
    assert await make_reward("reasoning_gym", seconds=30)(grid, "1 2") == 1.0
    with pytest.raises(RewardError, match="not a reasoning-gym prompt"):
        await make_reward("reasoning_gym")({"answer": "4"}, "4")
    with pytest.raises(RewardError, match="grading by reasoning_gym: ValueError"):
        await make_reward("reasoning_gym")(entry | {"source_dataset": "nothing"}, "4")


def test_the_command_lists_them_with_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    listed = runner.invoke(app, ["rewards"]).output
    assert all(name in listed for name in REWARDS)
    assert "of computing that comparing may take" in runner.invoke(app, ["rewards", "math"]).output
    wrong = runner.invoke(app, ["rewards", "maths"])
    assert wrong.exit_code == 2
    assert "did you mean 'math'" in wrong.output
