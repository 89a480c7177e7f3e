"""Calls that are sequences of their own: rewards reach the right sample, whoever calls at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

from rillflow.agents.workflows.sequences import Sequences
from team_play import play_team


async def say(asked: str) -> str:
    return asked.rpartition("user\n")[2].partition("<")[0]


async def test_rewards_reach_their_sample_even_if_calls_are_made_at_once() -> None:
    async def play(episode: Any) -> dict[str, float]:
        calls = Sequences(episode, {})
        spoken = await asyncio.gather(*(calls.ask("solver", str(number)) for number in range(5)))
        many = await calls.ask_many("solver", "7", 2)
        for one in [*spoken, *many]:
            calls.reward(one, float(one.text))
        return calls.outcome(0.0)

    episode = await play_team(play, {}, {"solver": say})
    assert episode.of("solver") == [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 7.0]


async def test_settings_of_a_call_go_before_the_roles() -> None:
    async def play(episode: Any) -> dict[str, float]:
        calls = Sequences(episode, {"solver": {"temperature": 0.5}})
        await calls.ask("solver", "1")
        await calls.ask("solver", "2", temperature=0.25)
        return calls.outcome(0.0)

    episode = await play_team(play, {}, {"solver": say})
    found = [float(sample.columns["temperatures"].max()) for sample in episode.record.samples("solver")]
    assert found == [0.5, 0.25]
