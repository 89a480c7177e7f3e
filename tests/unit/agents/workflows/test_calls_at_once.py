"""Rewards by call reach the sample of exactly that answer, also with concurrent calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rillflow.agents.workflows.multi_policy import outcome, user
from rillflow.errors import WorkflowError
from team_play import play_team


async def say(asked: str) -> str:
    return asked.rpartition("user\n")[2].partition("<")[0]


async def test_rewards_reach_their_sample_even_if_calls_are_made_at_once() -> None:
    async def play(episode: Any) -> dict[str, float]:
        solver, checker = episode.role("solver"), episode.role("checker")
        said = await asyncio.gather(
            *(solver.ask(user(str(number))) for number in range(5)), *(checker.ask(user("9")) for _ in range(2))
        )
        many = await solver.ask_many(user("7"), 2)
        for one in [*said, *many]:
            episode.reward(float(one.text), call=one.call)
        return outcome(episode, 0.0)

    episode = await play_team(play, {}, {"solver": say}, roles={"checker": "solver"})
    assert sorted(episode.of("solver")) == [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 7.0]
    assert episode.of("checker") == [9.0, 9.0]
    for meta, sample in zip(episode.samples, episode.record.samples("solver"), strict=True):
        assert sample.columns["rewards"][-1] == meta.reward


async def test_the_solvers_policy_comes_first() -> None:
    async def play(episode: Any) -> dict[str, float]:
        return outcome(episode, 1.0)

    with pytest.raises(WorkflowError, match="solver's policy first"):
        await play_team(play, {}, {"other": say, "solver": say})
