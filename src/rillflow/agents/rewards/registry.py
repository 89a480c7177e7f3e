"""Rewards by name, and several of them added up.

Invariant: what is wrong with a recipe's reward is a ConfigError before anything is played; what fails later is no
reward, and never 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from rillflow.agents.rewards.calling import call
from rillflow.agents.rewards.code import Code
from rillflow.agents.rewards.exact_match import ExactMatch
from rillflow.agents.rewards.f1 import F1
from rillflow.agents.rewards.format import Format
from rillflow.agents.rewards.judge import Judge
from rillflow.agents.rewards.length import Length
from rillflow.agents.rewards.math import Math
from rillflow.agents.rewards.reasoning_gym import ReasoningGym
from rillflow.agents.rewards.shipped import ShippedReward
from rillflow.config import RewardConfig, resolve_object
from rillflow.config.load import validated
from rillflow.errors import ConfigError, RewardError
from rillflow.types import Scored

Reward = Callable[[dict[str, Any], Any], Any]

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
_GIVEN = ("payload", "answer")  # what every reward function gets


def load_reward(reward: str | Sequence[RewardConfig]) -> Reward:
    """The function that a recipe's `reward` names: `reward(payload, answer)`, plain or async."""
    if isinstance(reward, str) and ":" in reward:
        found: Reward = resolve_object(reward)
        return found
    parts = [RewardConfig(name=reward)] if isinstance(reward, str) else list(reward)
    if not parts:
        raise ConfigError("`reward` is an empty list", "name a reward, or leave it out: then the workflow returns it")
    labels = _different([_label(part.name) for part in parts])
    return Sum([Part(label, part.weight, _made(part)) for label, part in zip(labels, parts, strict=True)])


def make_reward(name: str, **options: Any) -> Reward:
    """`load_reward` of one, for use in Python: `await make_reward("math")(payload, answer)`."""
    return load_reward([RewardConfig(name=name, options=options)])


def reward_class(name: str) -> type[ShippedReward]:
    if name not in REWARDS:
        close = get_close_matches(name, REWARDS, 1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        known = ", ".join(REWARDS)
        raise ConfigError(f"there is no reward {name!r}", f"{guess}known: {known}; or module:function")
    return REWARDS[name]


async def prepare_reward(reward: Reward | None) -> None:
    """Let a reward make ready what takes longer than a reward may; before the first is asked for."""
    for part in reward.parts if isinstance(reward, Sum) else ():
        if isinstance(part.reward, ShippedReward):
            await part.reward.prepare()


class Part(NamedTuple):
    label: str
    weight: float
    reward: Reward


class Sum:
    """Rewards that are weighted and added."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    async def __call__(self, payload: dict[str, Any], answer: Any) -> Scored:
        said = {part.label: _number(part.label, await call(part.reward, payload, answer)) for part in self.parts}
        return Scored(math.fsum(part.weight * said[part.label] for part in self.parts), said)


def _made(part: RewardConfig) -> Reward:
    if ":" in part.name:
        return _custom(part)
    kind = reward_class(part.name)
    try:
        return validated(part.options, kind)
    except ConfigError as error:
        raise ConfigError(f"reward {part.name}: {error.message}", error.hint) from None


def _custom(part: RewardConfig) -> Reward:
    """A function of the user's; the options are its further arguments, or, of a class, those of its constructor."""
    found: Callable[..., Any] = resolve_object(part.name)
    if not callable(found):
        raise ConfigError(f"reward {part.name} is not a function", "write `def reward(payload, answer):`")
    is_class = inspect.isclass(found)
    try:
        inspect.signature(found).bind(*() if is_class else _GIVEN, **part.options)
        return found(**part.options) if is_class else partial(found, **part.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward {part.name}: its options do not fit: {error}",
            "write `def reward(payload, answer, OPTION=…):`, or a class that takes the options and has `__call__`",
        ) from error


def _number(label: str, value: Any) -> float:
    """A part gives one number: rewards of several policies are a workflow's, or of one function's, business."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(f"the reward {label} is {value!r:.80}, not a finite number", "return a float")
    return float(value)


def _label(name: str) -> str:
    """What a part is called in metrics: a function's own name."""
    return name.rpartition(":")[2]


def _different(labels: Sequence[str]) -> list[str]:
    """Names of their own for parts that are called alike."""
    return [
        label if labels.count(label) == 1 else f"{label}_{labels[:place].count(label)}"
        for place, label in enumerate(labels)
    ]
