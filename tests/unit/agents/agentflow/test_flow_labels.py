"""Labels: the value of a step by its outcome, and the text that a process reward model reads."""

from __future__ import annotations

import pytest

from rillflow.agents.agentflow.actions import Decision
from rillflow.agents.agentflow.collect import Played
from rillflow.agents.agentflow.judge import read_score
from rillflow.agents.agentflow.labels import label_by_returns, split
from rillflow.agents.agentflow.prm_text import prm_row

LOOK, LOOK_ELSEWHERE = Decision("a", "search", "red pens"), Decision("a", "search", "blue pens")
GOOD, BAD = Decision("b", "answer", "12"), Decision("b", "answer", "13")


def episode(*decisions: Decision, outcome: float, prompt: str = "p") -> Played:
    return Played("t", prompt, "How many?", decisions, outcome)


def test_a_step_is_worth_the_mean_outcome_of_the_episodes_that_took_it() -> None:
    rows = label_by_returns(
        [
            episode(LOOK, GOOD, outcome=1.0),
            episode(LOOK, BAD, outcome=0.0),
            episode(LOOK, GOOD, outcome=1.0),
            episode(LOOK_ELSEWHERE, GOOD, outcome=0.0),
            episode(LOOK, outcome=0.0, prompt="another"),
        ]
    )
    labels = [[round(step["label"], 3) for step in row["steps"]] for row in rows]
    assert labels == [[0.667, 1.0], [0.667, 0.0], [0.667, 1.0], [0.0, 0.0], [0.0]]


def test_outcomes_are_cut_to_what_a_label_may_be() -> None:
    (row,) = label_by_returns([episode(LOOK, outcome=-3.0)])
    assert row["steps"][0]["label"] == 0.0


def test_the_text_is_the_question_and_the_decisions_and_nothing_of_the_world() -> None:
    assert prm_row(" How many?\n", [LOOK, Decision("so\nthen", "answer", "12\n")]) == {
        "prompt": "How many?\n",
        "steps": [{"text": "a > search: red pens"}, {"text": "so then > answer: 12"}],
    }


def test_no_prompt_is_both_learned_from_and_held_out() -> None:
    episodes = [episode(LOOK, outcome=1.0, prompt=f"p{number // 2:02d}") for number in range(40)]
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
    assert read_score(text) == score
