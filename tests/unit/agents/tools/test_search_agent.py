"""Search and answer: a model's text is understood or corrected, and found passages are not trained."""

from __future__ import annotations

import pytest

from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.agents.workflows import question
from rillflow.agents.workflows.question import LAST, WRONG, Action, play_search, read_action
from rillflow.rollout.episode import Surroundings
from scripted_play import play_scripted


def search(query: str) -> str:
    """Find passages."""
    return f"passage about {query}"


PLACE = Surroundings(tools=OpenToolbox([tool_of(search)]))
QUESTION = {"question": "Where was he born?"}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("I look. <search> cats </search>", Action("search", "cats")),
        ("<search>cats", Action("search", "cats")),  # the closing tag was the stop string
        ("<answer>New York</answer> and more", Action("answer", "New York")),
        ("<search>a</search><information>made up</information><answer>b", Action("search", "a")),
        ("<search>one <search>two", Action("search", "two")),  # begun again: the innermost counts
        ("<search></search>", None),
        ("<answer>   ", None),
        ("no tag at all", None),
        ("</search> <answr>x</answr>", None),
    ],
)
def test_reading(text: str, action: Action | None) -> None:
    assert read_action(text) == action


async def test_what_was_found_comes_back_and_is_not_trained() -> None:
    texts = ["I look it up. <search>his birth</search>", "So <answer>Galati</answer>"]
    played = await play_scripted(play_search, QUESTION, texts, PLACE)
    assert played.answer == "Galati"
    assert "<information>passage about his birth</information>" in played.engine.asked[1]
    # One path, on which exactly what the engine sampled trains; the stop string ended both answers.
    (trained,) = played.trained()
    assert [text.split("<|im_end|>")[0] for text in trained] == texts
    (sample,) = played.samples
    assert sample.trained == sum(len(tokens) for tokens in played.engine.said)
    assert not any("information" in text for text in trained)


async def test_what_makes_no_sense_is_corrected_and_the_last_turn_is_told() -> None:
    texts = ["hm", "<search>a</search>", "<search>b</search>"]
    played = await play_scripted(play_search, QUESTION, texts, Surroundings(options={"turns": 3}, tools=PLACE.tools))
    assert played.answer is None
    assert played.engine.asked[1].count(WRONG) == 1
    assert LAST not in played.engine.asked[1]
    assert LAST in played.engine.asked[2]


async def test_another_tool_and_other_instructions() -> None:
    box = OpenToolbox([tool_of(search, name="wiki")])
    place = Surroundings(options={"tool": "wiki", "instructions": "Look first."}, tools=box)
    played = await play_scripted(play_search, QUESTION, ["<search>a</search>", "<answer>b</answer>"], place)
    assert played.answer == "b"
    assert "Look first." in played.engine.asked[0]
    assert question.INSTRUCTIONS not in played.engine.asked[0]
    assert "passage about a" in played.engine.asked[1]


async def test_tool_calls() -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    wrong = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call>'
    place = Surroundings(options={"system": "Be brief."}, tools=PLACE.tools)
    played = await play_scripted(question.play_with_tools, QUESTION, [wrong, call, "done"], place)
    assert played.answer == "done"
    assert "Be brief." in played.engine.asked[0]
    assert "error: query: missing; the arguments are: query" in played.engine.asked[1]
    assert "passage about x" in played.engine.asked[2]
    (trained,) = played.trained()
    assert [text.split("<|im_end|>")[0] for text in trained] == [wrong, call, "done"]


async def test_tool_calls_without_end() -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    place = Surroundings(options={"turns": 2}, tools=PLACE.tools)
    played = await play_scripted(question.play_with_tools, QUESTION, [call, call], place)
    assert played.answer is None
