"""Solver and selector: two programs from one prompt, really run against hidden tests, and the choice between them."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.agents.workflows.coding import choice_of, play_selector, worth_of_choice
from team_play import in_turn, play_team

PAYLOAD: dict[str, Any] = {
    "question": "Write f that adds one.",
    "test_list": ["assert f(1) == 2", "assert f(5) == 6"],
}
RIGHT, WRONG = "```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return 2 * x\n```"


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("programs", "choice", "selector", "trajectory"),
    [
        ([RIGHT, WRONG], "<final>A</final>", 1.0, 1.0),
        ([RIGHT, WRONG], "<final>B</final>", 0.0, 0.0),
        ([WRONG, RIGHT], "<final>A</final> or rather <final>B</final>", 1.0, 1.0),
        ([WRONG, RIGHT], "neither", 0.0, 0.0),
        ([RIGHT, RIGHT], "<final>B</final>", 0.5, 1.0),
        ([WRONG, WRONG], "<final>B</final>", 0.5, 0.0),
    ],
)
async def test_each_answer_has_its_own_reward(
    programs: list[str], choice: str, selector: float, trajectory: float
) -> None:
    policies = {"solver": in_turn(programs), "selector": in_turn([choice])}
    episode = await play_team(play_selector, PAYLOAD, policies)
    assert episode.of("solver") == [float(program == RIGHT) for program in programs]
    assert episode.of("selector") == [selector]
    assert episode.rewards == {"solver": trajectory, "selector": selector}
    (asked,) = episode.asked["selector"]
    assert asked.index(f"Program A:\n{programs[0]}") < asked.index(f"Program B:\n{programs[1]}")
    assert "assert f(1) == 2" in asked
    assert "assert f(5)" not in asked, "one test is an example, the others are hidden"


@pytest.mark.parametrize("a", [True, False])
@pytest.mark.parametrize("b", [True, False])
def test_what_a_choice_is_worth(a: bool, b: bool) -> None:
    assert worth_of_choice(None, a, b) == 0.0
    assert worth_of_choice("A", a, b) + worth_of_choice("B", a, b) == 1.0
    if a != b:
        assert worth_of_choice("A", a, b) == float(a)


@pytest.mark.parametrize(
    ("text", "choice"), [("<final> b </final>", "B"), ("<final>C</final>", None), ("A", None), ("", None)]
)
def test_choices(text: str, choice: str | None) -> None:
    assert choice_of(text) == choice
