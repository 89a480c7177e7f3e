"""How rewards read answers and prompts."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.agents.rewards.base import golds, inside, last_number, text_of
from rillflow.errors import RewardError
from soak import repetitions


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, ""),
        ("  four ", "  four "),
        (4, "4"),
        ({"answer": "four", "stdout": "thinking", "returncode": 0}, "four"),
        ({"answer": None, "stdout": "four\n", "returncode": 0}, "four\n"),
    ],
)
def test_the_text_of_what_was_returned(answer: Any, text: str) -> None:
    assert text_of(answer) == text


def test_what_is_no_text_is_no_reward() -> None:
    with pytest.raises(RewardError, match="list, not text"):
        text_of(["four"])


def test_what_a_tag_holds() -> None:
    assert inside("<answer>3</answer> no: <answer>\n4 </answer>.", "answer") == "4"
    assert inside("<answer>4", "answer") is None


@settings(max_examples=repetitions(100, 500), deadline=None)
@given(st.lists(st.sampled_from(["<a>", "</a>", "<a", ">", "/", " ", "\n", "x", "<b>", "</b>"]), max_size=12))
def test_what_a_tag_holds_is_what_the_pattern_found(parts: list[str]) -> None:
    text = "".join(parts)
    found = re.findall(r"<a>(.*?)</a>", text, re.DOTALL)
    assert inside(text, "a") == (found[-1].strip() if found else None)


@pytest.mark.parametrize("text", ["<answer>" * 50_000, "<answer></answer>" * 50_000, "</answer>" * 50_000])
def test_finding_a_tag_takes_no_longer_than_reading(text: str) -> None:
    started = time.process_time()
    inside(text, "answer")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "number"), [("4 - 9 = -5.", "-5"), ("1,234.50 and more", "1234.50"), ("x = 07", "07"), ("none", None)]
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_right_answers_of_a_prompt() -> None:
    assert golds({"question": "?", "answer": 4}) == ["4"]
    assert golds({"golden_answers": ["four", "4"]}) == ["four", "4"]
    assert golds({"answer": "4", "sum": "5"}, "sum") == ["5"]


@pytest.mark.parametrize(
    "payload", [{}, {"answer": None}, {"answer": []}, {"answer": {"a": 1}}, {"answer": "x" * 70000}]
)
def test_a_prompt_without_a_right_answer_is_no_reward(payload: dict[str, Any]) -> None:
    with pytest.raises(RewardError):
        golds(payload)
