"""Solver with selector, and solver with tester: programs are really run against hidden tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rillflow.agents.sandbox import Cases, Pairs
from rillflow.agents.workflows.coding import (
    choice_of,
    feedback,
    play_selector,
    play_tester,
    reference_of,
    worth_of_cases,
    worth_of_choice,
    written_cases,
)
from rillflow.errors import WorkflowError
from team_play import TeamPlayed, in_turn, play_team

PAYLOAD: dict[str, Any] = {
    "question": "Write f that adds one.",
    "test_list": ["assert f(1) == 2", "assert f(5) == 6"],
    "code": "def f(x):\n    return x + 1",
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
async def test_programs_and_the_choice_have_their_own_rewards(
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


def cases(*pairs: tuple[str, Any]) -> str:
    return "Here they are: " + json.dumps([{"input": given, "output": wanted} for given, wanted in pairs])


SHARP = cases(("f(1)", "2"), ("f(3)", "4"))  # the wrong program passes one of them
BLUNT = cases(("f(1)", "2"), ("f(x=1)", 2))  # it passes both
INVALID = cases(("f(1)", "2"), ("f(2)", "4"))


async def played(solver: list[str], tester: str) -> TeamPlayed:
    return await play_team(play_tester, PAYLOAD, {"solver": in_turn(solver), "tester": in_turn([tester])})


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("solver", "tester", "solved", "tested"),
    [
        ([RIGHT], SHARP, [1.0], 1.0),
        ([WRONG, RIGHT], SHARP, [0.0, 1.0], 1.0),
        ([WRONG], BLUNT, [0.0], 0.5),  # valid, but says that a wrong program is right: no second try
        ([RIGHT], INVALID, [1.0], 0.0),  # fails an invalid case, but passes the hidden tests: no second try
        ([WRONG], "no cases", [0.0], 0.0),
        ([WRONG], INVALID, [0.0], 0.0),  # passes all of them
    ],
)
async def test_programs_and_cases_have_their_own_rewards(
    solver: list[str], tester: str, solved: list[float], tested: float
) -> None:
    episode = await played(solver, tester)
    assert episode.of("solver") == solved
    assert episode.of("tester") == [tested]
    assert episode.rewards == {"solver": solved[-1], "tester": tested}
    if len(solver) == 2:
        assert "f(1) should give 2: passed\nf(3) should give 4: failed" in episode.asked["solver"][1]
        assert "return 2 * x" in episode.asked["tester"][0]


async def test_without_a_reference_nothing_can_be_judged() -> None:
    payload = {"question": "?", "test_list": ["assert f(1) == 2"]}
    with pytest.raises(WorkflowError, match="no reference"):
        await play_team(play_tester, payload, {"solver": in_turn([RIGHT])})


def test_references() -> None:
    assert reference_of({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}) == "def f():\n    return 1\n"
    assert reference_of({"prompt": "words", "code": "x = 1"}) == "x = 1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        cases(("f(1)", "2")),
        cases(("f(1)", "2"), ("f(2)", "3"), ("f(3)", "4")),
        cases(("f(1)", "2"), ("open('x').read()", "''")),
        cases(("f(1)", "2"), ("f(g(1))", "3")),
        cases(("f(1) == 2\nassert f(2)", "3"), ("no call", "1")),
        cases(("f(1)", "2"), ("f(2)", "9" * 3000)),
        '[{"input": "f(1)"}, {"output": "2"}]',
        "[" * 5000,
    ],
)
def test_what_is_not_two_cases(text: str) -> None:
    assert written_cases(text, PAYLOAD) is None


def test_two_cases() -> None:
    text = "```json\n" + cases(("f([1, 2])", "[2]"), ("f('[')", [1])).removeprefix("Here they are: ") + "\n```"
    found = written_cases(text, PAYLOAD)
    assert isinstance(found, Cases)
    assert [(case.arguments, case.expected) for case in found.cases] == [(([1, 2],), [2]), (("[",), [1])]
    assert feedback(text, [True, False]).splitlines()[1] == "f('[') should give [1]: failed"


def test_cases_of_programs_that_read_and_write() -> None:
    found = written_cases(cases(("1 2\n", "3\n"), ("", "0")), {"inputs": [], "outputs": []})
    assert found == Pairs(pairs=(("1 2\n", "3\n"), ("", "0")))


@pytest.mark.parametrize(
    ("valid", "says", "truth", "worth"),
    [(True, True, True, 1.0), (True, False, False, 1.0), (True, True, False, 0.5), (False, True, True, 0.0)],
)
def test_what_cases_are_worth(valid: bool, says: bool, truth: bool, worth: float) -> None:
    assert worth_of_cases(valid=valid, says=says, truth=truth) == worth
