"""Rewards of whole groups: functions that name `group` and return a number for each of its episodes.

Invariants: user code runs in threads, never on the caller's event loop, also where it is async. Numbers are finite and
as many as the group has episodes, or there is no reward.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from rillflow.agents.rewards.calling import OF_GROUPS, Part, as_number, in_thread, parameters_of
from rillflow.errors import RewardError
from rillflow.types import FinishedEpisode, Scored


class GroupSum:
    """The parts of a recipe's reward that are of whole groups, weighted and added (`contracts.GroupReward`)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    async def score(self, group: Sequence[FinishedEpisode]) -> list[Scored]:
        """Return what each episode of a group is given, in their order."""
        said = {part.label: _numbers(part.label, await _ask(part.reward, group), len(group)) for part in self.parts}
        return [
            Scored(
                math.fsum(part.weight * said[part.label][n] for part in self.parts),
                {label: numbers[n] for label, numbers in said.items()},
            )
            for n in range(len(group))
        ]


async def _ask(reward: Callable[..., Any], group: Sequence[FinishedEpisode]) -> Any:
    known = {"payload": group[0].payload, "group": list(group)}
    named = {name: known[name] for name in parameters_of(reward, among=OF_GROUPS).names}
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return await in_thread(_run, partial(reward, **named))
    return await in_thread(partial(reward, **named))


def _run(reward: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(reward())


def _numbers(label: str, values: Any, episodes: int) -> list[float]:
    try:
        found = list(values)
    except TypeError:
        raise RewardError(f"the reward {label} is {values!r:.80}, not a list of numbers", "return a list") from None
    if len(found) != episodes:
        raise RewardError(
            f"the reward {label} gave {len(found)} numbers for a group of {episodes} episodes",
            "return one number for each episode of `group`, in its order",
        )
    return [as_number(label, value) for value in found]
