"""Rewards by name, and weighted sums of them.

Invariant: a wrong reward of a recipe is a ConfigError before anything is played. A later failure is a RewardError and
never 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rillflow.agents.options import read_options
from rillflow.agents.rewards.answer_text import F1, ExactMatch, Format, Length, Math, ReasoningGym
from rillflow.agents.rewards.base import (
    GROUP,
    NAMES,
    OF_GROUPS,
    GroupSum,
    Part,
    ShippedReward,
    Sum,
    is_of_groups,
    parameters_of,
)
from rillflow.agents.rewards.code import Code
from rillflow.agents.rewards.judge import Judge
from rillflow.config import RewardConfig, resolve_object
from rillflow.errors import ConfigError, did_you_mean

Reward = Callable[..., Any]

REWARDS: dict[str, type[ShippedReward]] = {
    "code": Code,
    "exact_match": ExactMatch,
    "f1": F1,
    "format": Format,
    "judge": Judge,
    "length": Length,
    "math": Math,
    "reasoning_gym": ReasoningGym,
}


def load_reward(reward: str | Sequence[RewardConfig], among: Sequence[str] = NAMES) -> Reward:
    """Return the reward of single episodes; `call` calls it. Its parameters must be `among` these names.

    Rewards of whole groups are left out: see `load_group_reward`.
    """
    parts = [Part(label, part.weight, _made(part, among)) for label, part in _labelled(reward)]
    own = [part for part in parts if not is_of_groups(part.reward)]
    return own[0].reward if own and isinstance(reward, str) and ":" in reward else Sum(own)


def load_group_reward(reward: str | Sequence[RewardConfig] | None) -> GroupSum | None:
    """Return the sum of a recipe's rewards that name `group`, or None if no reward does."""
    named = [] if reward is None else [(label, part) for label, part in _labelled(reward) if ":" in part.name]
    parts = [Part(label, part.weight, _custom(part, NAMES)) for label, part in named]
    parts = [part for part in parts if is_of_groups(part.reward)]
    return GroupSum(parts) if parts else None


def make_reward(name: str, **options: Any) -> Reward:
    """Return one shipped reward, for use in Python: `await make_reward("math")(payload, answer)`."""
    return load_reward([RewardConfig(name=name, options=options)])


def reward_class(name: str) -> type[ShippedReward]:
    """Return the class of a shipped reward."""
    if name not in REWARDS:
        known = ", ".join(REWARDS)
        raise ConfigError(
            f"there is no reward {name!r}", f"{did_you_mean(name, REWARDS)}known: {known}; or module:function"
        )
    return REWARDS[name]


async def prepare_reward(reward: Reward | None) -> None:
    """Let a reward prepare what takes longer than a reward may take, before its first call."""
    for part in reward.parts if isinstance(reward, Sum) else ():
        if isinstance(part.reward, ShippedReward):
            await part.reward.prepare()


def _labelled(reward: str | Sequence[RewardConfig]) -> list[tuple[str, RewardConfig]]:
    """Return the parts of a recipe's `reward`, each with its name in metrics."""
    parts = [RewardConfig(name=reward)] if isinstance(reward, str) else list(reward)
    if not parts:
        raise ConfigError("`reward` is an empty list", "name a reward, or leave it out: then the workflow returns it")
    return list(zip(_different([_label(part.name) for part in parts]), parts, strict=True))


def _made(part: RewardConfig, among: Sequence[str]) -> Reward:
    if ":" in part.name:
        return _custom(part, among)
    return read_options(f"reward {part.name}", part.options, reward_class(part.name))


def _custom(part: RewardConfig, among: Sequence[str]) -> Reward:
    """Return a user's reward; the options are further arguments of a function, or those of a class's constructor."""
    found: Callable[..., Any] = resolve_object(part.name)
    if not callable(found):
        raise ConfigError(f"reward {part.name} is not a function", "write `def reward(payload, answer):`")
    is_class = inspect.isclass(found)
    if taken := [name for name in part.options if name in (*NAMES, GROUP) and not is_class]:
        raise ConfigError(
            f"reward {part.name}: its option {taken[0]!r} has the name of an argument that every reward gets",
            "give the option another name",
        )
    try:
        if part.options:
            inspect.signature(found).bind_partial(**part.options)
        made: Reward = found(**part.options) if is_class else partial(found, **part.options) if part.options else found
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward {part.name}: its options do not fit: {error}",
            "write `def reward(payload, answer, OPTION=…):`, or a class that takes the options and has `__call__`",
        ) from error
    if is_of_groups(made) and among is not NAMES:
        raise ConfigError(
            f"reward {part.name}: its parameter `group` has no value here: it is called for single answers",
            "name a reward of payload and answer",
        )
    parameters_of(made, part.name, OF_GROUPS if is_of_groups(made) else among)
    return made


def _label(name: str) -> str:
    """Return the name of a part in metrics: a function's own name."""
    return name.rpartition(":")[2]


def _different(labels: Sequence[str]) -> list[str]:
    """Return unique names: equal names get numbers."""
    return [
        label if labels.count(label) == 1 else f"{label}_{labels[:place].count(label)}"
        for place, label in enumerate(labels)
    ]
