"""Rewards by name, and several of them added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rillflow.config import RewardConfig, resolve_object

Reward = Callable[[dict[str, Any], Any], Any]


def load_reward(reward: str | Sequence[RewardConfig]) -> Reward:
    """The function that a recipe's `reward` names: `reward(payload, answer)`, plain or async."""
    if not isinstance(reward, str):
        raise NotImplementedError
    found: Reward = resolve_object(reward)
    return found
