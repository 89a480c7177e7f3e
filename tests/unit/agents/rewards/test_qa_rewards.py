"""`exact_match` and `f1` as SQuAD's evaluation has them."""

from __future__ import annotations

import pytest

from rillflow.agents.rewards.answer_text import exact, f1, normalised
from rillflow.agents.rewards.registry import make_reward
from rillflow.errors import RewardError


def test_normalising_takes_away_what_does_not_count() -> None:
    assert normalised("The  Eiffel-Tower, in a Park!") == "eiffeltower in park"


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("the cat sat", "cat sat down", 0.8),  # two shared words: 2·2 / (2 + 3)
        ("cat cat", "cat", 2 / 3),  # a word counts as often as it occurs
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("a", "the", 0.0),  # nothing is left of either, and they are not the same
        ("The", "the", 1.0),
        ("", "", 1.0),
    ],
)
def test_f1_of_words(answer: str, gold: str, score: float) -> None:
    assert f1(answer, [gold]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("the", "A", 0),
        ("?", "A", 0),
        ("a.", "A", 1),
        ("(A)", "A", 1),
        ("an", "?!", 0),
        ("!?", "?!", 0),
        (" ?! ", "?!", 1),
    ],
)
def test_a_right_answer_of_which_nothing_is_left_is_compared_as_it_is(answer: str, gold: str, score: float) -> None:
    assert exact(answer, [gold]) == score
    assert exact(answer, ["Paris", gold]) == score
    assert f1(answer, [gold]) == score


async def test_the_best_of_several_right_answers_counts() -> None:
    payload = {"golden_answers": ["New York City", "NYC"]}
    assert await make_reward("exact_match")(payload, "nyc.") == 1.0
    assert await make_reward("exact_match")(payload, "New York") == 0.0
    assert await make_reward("f1")(payload, "New York") == pytest.approx(0.8)


async def test_only_what_stands_in_the_tag_is_the_answer() -> None:
    for name in ("exact_match", "f1"):
        reward = make_reward(name, inside="answer")
        assert await reward({"answer": "Paris"}, "It is in France. <answer>Paris</answer>") == 1.0
        assert await reward({"answer": "Paris"}, "Paris") == 0.0


async def test_no_answer_earns_nothing_and_no_right_answer_is_no_reward() -> None:
    assert await make_reward("exact_match")({"answer": "the"}, None) == 0.0
    with pytest.raises(RewardError, match="no right answer under gold"):
        await make_reward("f1", key="gold")({"answer": "Paris"}, "Paris")
