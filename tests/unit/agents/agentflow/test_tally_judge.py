"""The judge of the tally that benches use: it rates by what any judge is sent, and by nothing else."""

from __future__ import annotations

import asyncio

import pytest

from bench.agentflow_judge import MODEL, RIGHT, USELESS, WRONG, rate, serving
from rillflow.agents.agentflow.labels import Played, Visited, by_judge, judge_prompt
from rillflow.agents.agentflow.models import Decision
from rillflow.agents.agentflow.options import Endpoint

QUESTION = "How many pens are in the red box and the blue box?"
BEGUN = f"{QUESTION}\nnothing\n6 more"
HALF = f"{QUESTION}\nsearch red pens: 7\nguess red pens: some\n4 more"
FOUND = f"{QUESTION}\nsearch red pens: 7\nsearch blue pens: 5\n4 more"
ADDED = f"{QUESTION}\nsearch red pens: 7\nsearch blue pens: 5\ncode 7+5: 12\n3 more"


@pytest.mark.parametrize(
    ("state", "action", "given", "score"),
    [
        (BEGUN, "search", "blue pens", RIGHT),
        (BEGUN, "search", "green pens", USELESS),
        (BEGUN, "search", "red cups", USELESS),
        (BEGUN, "weigh", "red pens", USELESS),
        (BEGUN, "think", "more", USELESS),
        (BEGUN, "answer", "7+5=12", WRONG),
        (HALF, "search", "red pens", USELESS),
        (HALF, "search", "blue pens", RIGHT),
        (HALF, "code", "7+7", USELESS),
        (FOUND, "code", "5+7", RIGHT),
        (FOUND, "code", "7+7", WRONG),
        (FOUND, "answer", "7+5=12", RIGHT),
        (ADDED, "code", "7+5", USELESS),
        (ADDED, "answer", "7+5=12", RIGHT),
        (ADDED, "answer", "7+5=13", WRONG),
        (ADDED, "answer", "12", WRONG),
        (ADDED.replace("3 more", "1 more"), "search", "red pens", WRONG),
    ],
)
def test_decisions_are_rated_by_the_rubric(state: str, action: str, given: str, score: float) -> None:
    assert rate(judge_prompt(state, Decision("so", action, given), None)) == score


def test_a_refused_look_up_is_wrong_and_what_cannot_be_read_has_no_score() -> None:
    later = f"{QUESTION}\nsearch red: error: no  in the red box\n5 more"
    assert rate(judge_prompt(BEGUN, Decision("so", "search", "red"), later)) == WRONG
    assert rate("Rate this.") is None


def test_the_product_reads_its_labels_over_http() -> None:
    look = Decision("so", "search", "red pens")
    episodes = [Played("t", "p", QUESTION, [Visited(BEGUN, [(look, None)])], 0.0)]
    with serving() as url:
        labels, missing = asyncio.run(by_judge(episodes, Endpoint(url=url, model=MODEL)))
    assert (labels, missing) == ({("p", BEGUN, look): RIGHT}, 0)
