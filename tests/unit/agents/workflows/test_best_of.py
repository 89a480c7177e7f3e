"""Best of n: the answer that is given most often is taken, and each has its own reward."""

from __future__ import annotations

import pytest

from rillflow.agents.workflows.question import play_best_of
from team_play import in_turn, play_team

PAYLOAD = {"question": "How many?", "answer": "7"}


@pytest.mark.parametrize(
    ("answers", "rewards", "trajectory"),
    [
        (["7", "3", " 7"], [1.0, 0.0, 1.0], 1.0),
        (["3", "7", "3"], [0.0, 1.0, 0.0], 0.0),
        (["7", "1", "2"], [1.0, 0.0, 0.0], 1.0),
    ],
)
async def test_the_answer_given_most_often_is_taken(
    answers: list[str], rewards: list[float], trajectory: float
) -> None:
    options = {"check": "rillflow.examples.digits:reward"}
    episode = await play_team(play_best_of, PAYLOAD, {"solver": in_turn(answers)}, options=options)
    assert episode.reward == trajectory
    assert episode.of("solver") == rewards
