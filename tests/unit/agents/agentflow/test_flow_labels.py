"""Labels of decisions by the outcomes that followed, and the text that a process reward model reads."""

from __future__ import annotations

import pytest

from rillflow.agents.agentflow.labels import (
    Played,
    Visited,
    balanced,
    both,
    by_continuations,
    by_returns,
    rows_of,
    split,
)
from rillflow.agents.agentflow.models import Decision
from rillflow.agents.rewards.judge import read_score

LOOK, LOOK_ELSEWHERE = Decision("a", "search", "red pens"), Decision("a", "search", "blue pens")
GOOD, BAD = Decision("b", "answer", "12"), Decision("b", "answer", "13")
BEGUN, FOUND = "How many?\nnothing", "How many?\nsearch red pens: 12"


def episode(*states: tuple[str, Decision], outcome: float, prompt: str = "p") -> Played:
    return Played("t", prompt, "How many?", [Visited(asked, [(taken, None)]) for asked, taken in states], outcome)


def test_returns_are_the_mean_outcome_of_the_episodes_that_took_a_decision_in_a_state() -> None:
    labels = by_returns(
        [
            episode((BEGUN, LOOK), (FOUND, GOOD), outcome=1.0),
            episode((BEGUN, LOOK), (FOUND, BAD), outcome=0.0),
            episode((BEGUN, LOOK_ELSEWHERE), outcome=-3.0),
            episode((BEGUN, LOOK), outcome=0.25, prompt="another"),
        ]
    )
    assert labels == {
        ("p", BEGUN, LOOK): 0.5,
        ("p", FOUND, GOOD): 1.0,
        ("p", FOUND, BAD): 0.0,
        ("p", BEGUN, LOOK_ELSEWHERE): 0.0,
        ("another", BEGUN, LOOK): 0.25,
    }


def test_continuations_label_every_sampled_decision_and_both_is_the_mean() -> None:
    played = Played("t", "p", "How many?", [Visited(BEGUN, [(LOOK, 0.5), (LOOK_ELSEWHERE, 0.0), (GOOD, None)])], 1.0)
    labels = by_continuations([played])
    assert labels == {("p", BEGUN, LOOK): 0.5, ("p", BEGUN, LOOK_ELSEWHERE): 0.0}
    assert both(labels, {("p", BEGUN, LOOK): 1.0}) == labels | {("p", BEGUN, LOOK): 0.75}


def test_the_text_holds_earlier_results_and_not_that_of_the_decision() -> None:
    played = episode((BEGUN, LOOK), (FOUND, GOOD), outcome=1.0)
    first, second = rows_of([played], by_returns([played]))
    assert first["messages"] == [{"role": "user", "content": BEGUN}]
    assert first["steps"] == [{"messages": [{"role": "assistant", "content": LOOK.written()}], "label": 1.0}]
    assert "12" in second["messages"][0]["content"]
    blind = rows_of([played], by_returns([played]), results=False)[1]
    assert blind["messages"] == [{"role": "user", "content": "How many?\nsearch red pens"}]


def test_the_rarer_class_is_repeated() -> None:
    played = [episode((f"{number}", LOOK), outcome=float(number == 0)) for number in range(5)]
    rows = rows_of(played, by_returns(played))
    labels = [row["steps"][0]["label"] for row in balanced(rows)]
    assert labels.count(1.0) == labels.count(0.0) == 4
    assert balanced(rows[1:]) == rows[1:], "one class alone cannot be balanced"


def test_no_prompt_is_both_learned_from_and_held_out() -> None:
    episodes = [episode((BEGUN, LOOK), outcome=1.0, prompt=f"p{number // 2:02d}") for number in range(40)]
    train, apart = split(episodes, 10)
    assert len(train) == 36
    assert len(apart) == 4
    assert not {one.prompt for one in train} & {one.prompt for one in apart}


@pytest.mark.parametrize(
    ("text", "score"),
    [('{"score": 0.7}', 0.7), ('I think {"score": 1} fits', 1.0), ('{"score": 2}', None), ('{"score": true}', None),
     ('{"rating": 1}', None), ("0.7", None), ("{", None), ('{"score": "1"}', None)],
)  # fmt: skip
def test_only_a_number_from_0_to_1_is_a_verdict(text: str, score: float | None) -> None:
    assert read_score(text, 1.0) == score
