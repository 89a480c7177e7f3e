"""Rewards that name `group`: loaded apart from those of single episodes, asked in threads, checked number by number."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rillflow.agents.rewards.base import OF_ANSWERS, Given, GroupSum, Part, call
from rillflow.agents.rewards.registry import load_group_reward, load_reward
from rillflow.config import RewardConfig
from rillflow.errors import ConfigError, RewardError
from rillflow.examples.stockroom import brief
from rillflow.types import EpisodeFacts, FinishedEpisode

MINE = """
def rank(group, most=1.0):
    order = sorted(range(len(group)), key=lambda n: len(group[n].answer))
    return [most * order.index(n) for n in range(len(group))]

def right(payload, answer):
    return float(answer == payload["answer"])

def both(answer, group):
    return [0.0 for _ in group]
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def episode(answer: Any, reward: float = 0.0) -> FinishedEpisode:
    facts = EpisodeFacts(task="t", prompt="p", policies=["agent"], seed=1, evaluating=False, seconds=2.0)
    return FinishedEpisode({"answer": "ab"}, answer, [{"role": "user", "content": "go"}], {"turns": 1.0}, facts, reward)


def of(*rewards: Callable[..., Any]) -> GroupSum:
    return GroupSum([Part(f"r{n}", 1.0 + n, reward) for n, reward in enumerate(rewards)])


async def test_a_recipe_has_parts_of_episodes_and_parts_of_groups(mine: str) -> None:
    parts = [
        RewardConfig(name=f"{mine}:right"),
        RewardConfig(name=f"{mine}:rank", options={"most": 3.0}, weight=0.5),
        RewardConfig(name="exact_match"),
    ]
    own, grouped = load_reward(parts), load_group_reward(parts)
    assert await call(own, Given({"answer": "ab"}, "ab")) == 2.0
    assert grouped is not None
    scored = await grouped.score([episode("abc"), episode("a")])
    assert [(float(one), one.parts) for one in scored] == [(1.5, {"rank": 3.0}), (0.0, {"rank": 0.0})]


async def test_a_reward_that_is_all_of_groups_leaves_nothing_to_episodes(mine: str) -> None:
    alone = f"{mine}:rank"
    assert await call(load_reward(alone), Given({}, "said")) == 0.0
    grouped = load_group_reward(alone)
    assert grouped is not None
    assert await grouped.score([episode("abc"), episode("a")]) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [None, "math", "exact_match", [RewardConfig(name="format")]])
def test_others_have_no_part_of_groups(reward: Any) -> None:
    assert load_group_reward(reward) is None


def test_what_cannot_be_given_is_refused_when_it_is_loaded(mine: str) -> None:
    with pytest.raises(ConfigError, match=r"both: its parameter 'answer' belongs to one episode"):
        load_reward(f"{mine}:both")
    with pytest.raises(ConfigError, match="called for single answers"):
        load_reward(f"{mine}:rank", OF_ANSWERS)
    with pytest.raises(ConfigError, match="'group' has the name of an argument that every reward gets"):
        load_reward([RewardConfig(name=f"{mine}:rank", options={"group": 1})])


async def test_it_sees_what_the_episodes_left(mine: str) -> None:
    seen: list[Any] = []

    def look(payload: Any, group: Sequence[FinishedEpisode]) -> list[float]:
        seen.append((payload, [(one.answer, one.messages, one.metrics, one.episode.task, one.reward) for one in group]))
        return [0.0] * len(group)

    await of(look).score([episode("x", 0.5)])
    assert seen == [({"answer": "ab"}, [("x", [{"role": "user", "content": "go"}], {"turns": 1.0}, "t", 0.5)])]


async def test_user_code_never_runs_on_the_callers_loop() -> None:
    threads: list[threading.Thread] = []

    def plain(group: Any) -> list[float]:
        threads.append(threading.current_thread())
        return [1.0]

    async def later(group: Any) -> list[float]:
        await asyncio.sleep(0)
        threads.append(threading.current_thread())
        return [2.0]

    assert await of(plain, later).score([episode("x")]) == [5.0]
    assert len(threads) == 2
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1.0], "gave 1 numbers for a group of 2 episodes"),
        (1.0, "not a list of numbers"),
        ([1.0, math.nan], "nan, not a finite number"),
        ([1.0, None], "None, not a finite number"),
    ],
)
async def test_what_is_not_a_number_for_each_is_no_reward(said: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        await of(lambda group: said).score([episode("x"), episode("y")])


def test_the_shortest_right_answer_of_the_stockroom_is_ranked_first() -> None:
    group = [episode("12 pens", 1.0), episode("12", 1.0), episode("7", 0.0), episode("12!", 1.0)]
    assert brief(group) == [0.0, 1.0, 0.0, 0.5]
    assert brief(group[:1]) == [0.0]
