"""`format` and `length`: what an answer looks like."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.agents.rewards.registry import make_reward
from rillflow.errors import ConfigError, RewardError
from rillflow.weights.model_folder import model_folder
from tiny_policy import tiny_tokenizer

ORDER = {"tags": ["think", "answer"]}


@pytest.mark.parametrize(
    ("options", "answer", "score"),
    [
        (ORDER, "<think>a\nb</think>\n<answer>4</answer>", 1.0),
        (ORDER, "<answer>4</answer><think>a</think>", 0.0),
        (ORDER, "So: <think>a</think><answer>4</answer>", 0.0),
        (ORDER, "<think>a</think><answer>4</answer> Yes!", 0.0),
        (ORDER, "<think>a <answer>3</answer></think><answer>4</answer>", 0.0),
        (ORDER, "<think>a</think><think>b</think><answer>4</answer>", 0.0),
        (ORDER, "<think>a</think><answer>4", 0.0),
        ({"json_keys": ["tool"]}, '{"tool": "count", "more": 1}', 1.0),
        ({"json_keys": ["tool"]}, '{"name": "count"}', 0.0),
        ({"json_keys": []}, "[1]", 0.0),
        ({"json_keys": []}, "[" * 100_000, 0.0),
        ({"pattern": r"\d+ apples"}, " 12 apples\n", 1.0),
        ({"pattern": r"\d+ apples"}, "12 apples!", 0.0),
        ({"pattern": ".*"}, None, 1.0),
        ({"pattern": ".*"}, "x" * 200_000, 0.0),
    ],
)
async def test_the_shape_of_an_answer(options: dict[str, Any], answer: str | None, score: float) -> None:
    assert await make_reward("format", **options)({}, answer) == score


async def test_a_pattern_that_backtracks_for_ever_is_no_reward() -> None:
    with pytest.raises(RewardError, match=r"longer than 0\.5 s"):
        await make_reward("format", pattern="(a+)+b", seconds=0.5)({}, "a" * 60)


@pytest.mark.parametrize("options", [{}, {"pattern": "a", "tags": ["b"]}, {"pattern": "("}, {"tags": []}])
def test_a_shape_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reward format"):
        make_reward("format", **options)


@pytest.mark.parametrize(("words", "score"), [(0, 0.0), (6, 0.0), (8, -0.5), (10, -1.0), (99, -1.0)])
async def test_long_answers_are_punished_more_and_more(words: int, score: float) -> None:
    assert await make_reward("length", longest=10, margin=4)({}, "word " * words) == score


async def test_lengths_in_characters_and_tokens() -> None:
    text = "How many cups are there?"
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    tokens = make_reward(
        "length", longest=2 * len(ids), margin=2 * len(ids), unit="tokens", model=str(model_folder("tiny"))
    )
    assert await tokens({}, text) == -0.5
    characters = make_reward("length", longest=2 * len(text), margin=2 * len(text), unit="characters")
    assert await characters({}, text) == -0.5


@pytest.mark.parametrize(
    "options",
    [{"longest": 4}, {"longest": 4, "margin": 5}, {"longest": 4, "margin": 2, "unit": "tokens"},
     {"longest": 4, "margin": 2, "model": "tiny"}, {"longest": 4, "margin": 2, "unit": "tokens", "model": "/nowhere"}],
)  # fmt: skip
def test_lengths_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reward length"):
        make_reward("length", **options)
