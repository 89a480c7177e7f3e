"""Decisions: what the schema describes is what is read, and nothing else is."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rillflow.agents.agentflow.models import Decision, parse, schema
from rillflow.agents.agentflow.options import PROMPTS, asked
from rillflow.agents.options import fill_template

ACTIONS = ["think", "search", "answer"]


def test_a_decision_is_read_as_it_was_written_and_is_of_the_schema() -> None:
    decision = Decision('a "thought"', "search", "café\n")
    assert parse(decision.written(), ACTIONS) == decision
    jsonschema.validate(json.loads(decision.written()), schema(ACTIONS, 20))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "search for it",
        "[1]",
        '{"thought": "a", "action": "search"}',
        '{"thought": "a", "action": "search", "action_input": "b", "more": "c"}',
        '{"thought": "a", "action": "fly", "action_input": "b"}',
        '{"thought": 1, "action": "search", "action_input": "b"}',
        '{"thought": "a", "action": "search", "action_input": "b"} and more',
        '{"thought": "a", "action": "search", "action_input": "' + "b" * 5000 + '"}',
        "[" * 100_000,
    ],
)
def test_everything_else_is_malformed_and_never_raises(text: str) -> None:
    assert parse(text, ACTIONS) is None


def test_without_a_list_of_actions_any_is_taken() -> None:
    assert parse('{"thought": "a", "action": "fly", "action_input": "b"}') == Decision("a", "fly", "b")


def test_prompts_are_filled_in_one_pass_and_may_show_json() -> None:
    assert fill_template('{"a": {question}} {memory}', {"question": "{memory}", "memory": "m"}) == '{"a": {memory}} m'
    final = asked(PROMPTS, "final", question="why?", memory="", actions="answer")
    assert final.startswith(asked(PROMPTS, "planner", question="why?", memory="", actions="answer"))
    assert "why?" in final
    assert "nothing" in final
    assert "left: 3" in asked(PROMPTS, "planner", question="why?", memory="", left=3)
