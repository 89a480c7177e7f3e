"""The rewards of an episode: those that a workflow or a reward function returns (a number, or a number for each
policy), those that were given to a session or to parts of it, and those that come after its end.

Invariants: every sample that an episode trains has a finite reward that was given to it or to its policy; no reward is
invented. A sample with several rewarded answers is trained as the recipe says (`trainer.step_rewards`), or refused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean
from typing import Any

import numpy as np

from rillflow.agents.rewards.registry import load_group_reward
from rillflow.config import Recipe
from rillflow.contracts import Clock
from rillflow.errors import RewardError, RillflowError, WorkflowError
from rillflow.gateway.sessions.rewards import Settled
from rillflow.gateway.trees.record import LeafReward, SessionRecord, leaf_rewards
from rillflow.gateway.trees.tree import TokenTree

LOOK = 1.0  # longest sleep between two looks at the clock
_BY_STEPS = ("own", "to_go")  # values of `trainer.step_rewards` with which a trainer reads rewards of single answers
_NONE_NAMED = "the workflow must return the reward, because the recipe names none"


@dataclass(frozen=True)
class RewardRules:
    """The rules of a recipe for rewards. `steps` is the `trainer.step_rewards` of the trainer of a policy's samples;
    samples of `untrained` agents need no reward; `ends` are the rewards of episodes that ended without an answer.
    `grouped`: the dataflow service adds a reward of the whole group."""

    steps: Mapping[str, str | None] = field(default_factory=dict)
    untrained: frozenset[str] = frozenset()
    ends: Mapping[str, float | str] = field(default_factory=dict)
    grouped: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> RewardRules:
        steps = {name: recipe.step_rewards(name) for name in recipe.policies}
        grouped = load_group_reward(recipe.reward) is not None
        return cls(steps, frozenset(recipe.untrained), recipe.ends, grouped)

    def end(self, cause: str, detail: str) -> tuple[str, float] | None:
        """Return the end that the recipe rewards, by its name there, and its reward; None: the task is retried."""
        name = next((name for name in (f"{cause}.{detail}", cause) if name in self.ends), cause)
        worth = self.ends.get(name)
        return (name, worth) if isinstance(worth, float) else None

    def trained(self, policy: str, tree: TokenTree, settled: Settled) -> list[LeafReward]:
        """Return the rewards of the samples that trainers get."""
        return [one for one in leaf_rewards(policy, tree, settled) if one.agent not in self.untrained]


def rewards_of(value: Any, policies: Sequence[str], *, answer_is_reward: bool) -> dict[str, float]:
    """The reward of each policy, in the order of `policies`: a number is that of all, a mapping names them."""
    kind = WorkflowError if answer_is_reward else RewardError
    what = _NONE_NAMED if answer_is_reward else "reward"
    if not isinstance(value, Mapping):
        number = _finite(value, kind, what)
        return dict.fromkeys(policies, number)
    unknown = [name for name in value if name not in policies]
    if unknown or not value:
        named = f"no policy {unknown[0]!r:.80}" if unknown else "no policy"
        raise kind(f"{what}: it names {named}", f"name the policies of the recipe: {', '.join(policies)}")
    return {name: _finite(value[name], kind, f"{what} of {name}") for name in policies if name in value}


def require_all(rewards: Mapping[str, float], sampled: Collection[str], *, answer_is_reward: bool) -> None:
    """Refuse rewards that leave out a policy which has `sampled`: its samples would be trained on a guess."""
    missing = sorted(set(sampled) - set(rewards))
    if missing:
        raise (WorkflowError if answer_is_reward else RewardError)(
            f"the episode sampled from {', '.join(missing)}, but the rewards name only {', '.join(rewards)}",
            "return a reward for every policy that the workflow calls, or one number for all",
        )


def rewards_given(settled: Settled, trees: Mapping[str, TokenTree], rules: RewardRules) -> dict[str, float]:
    """Return the reward of each policy: its session's, or the mean of its samples' own.

    A policy without any is absent. RewardError where some of its samples have a reward, and others have none.
    """
    rewards = dict(settled.session)
    for policy, tree in trees.items():
        if policy in rewards:
            continue
        samples = rules.trained(policy, tree, settled)
        own = [one.value for one in samples if one.value is not None]
        if own and len(own) < len(samples):
            raise RewardError(
                f"{len(samples) - len(own)} of {len(samples)} samples of policy {policy!r} have no reward",
                "reward an answer of every conversation, or the whole session",
            )
        if own:
            rewards[policy] = fmean(own)
    return rewards


def check_parts(settled: Settled, trees: Mapping[str, TokenTree], rules: RewardRules) -> None:
    """Refuse rewards of answers that no trainer would read, or of which the recipe does not say how they are read."""
    for policy, tree in trees.items():
        how = rules.steps.get(policy)
        if how not in _BY_STEPS and not settled.answers:
            continue
        samples = rules.trained(policy, tree, settled)
        most = max((len(one.answers) for one in samples), default=0)
        if how in _BY_STEPS:
            if samples and not most:
                raise RewardError(
                    f"no answer of policy {policy!r} has a reward, and trainer.step_rewards={how} reads no others",
                    "give episode.reward(value, call=…), or leave trainer.step_rewards out",
                )
        elif any(one.leaf is not None and one.answers for one in samples):
            raise RewardError(
                f"a sample of policy {policy!r} has a reward of its leaf, and its answers have others",
                "reward one of them, or set trainer.step_rewards to own or to_go",
            )
        elif most > 1 and how is None:
            raise RewardError(
                f"a sample of policy {policy!r} holds {most} answers with a reward, and the recipe does not say how "
                "they are trained",
                "set trainer.step_rewards: sum for their sum, own or to_go for advantages of single answers",
            )


def role_rewards(record: SessionRecord, rewards: Mapping[str, float], roles: Collection[str]) -> dict[str, float]:
    """Return the mean reward of the samples of each of these roles, by the name of its metric."""
    found: dict[str, list[float]] = {}
    settled = record.settled()
    for policy, tree in record.trees.items() if roles else ():
        for one in leaf_rewards(policy, tree, settled):
            if one.agent in roles:
                found.setdefault(one.agent, []).append(rewards[policy] if one.value is None else one.value)
    return {f"role_reward/{role}": fmean(values) for role, values in found.items()}


def _finite(value: Any, kind: type[RillflowError], what: str) -> float:
    if not isinstance(value, Real | np.bool_):  # numpy's other scalars are real numbers to Python, too
        raise kind(f"{what}: got {value!r:.80}, not a number")
    if not math.isfinite(value):
        raise RewardError(f"{what} is {value}")
    return float(value)


class LateRewards:
    """Wakes the episodes that wait for a reward of their session after they were played, until a deadline. It holds one
    entry for each session that is waited for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._news: dict[str, asyncio.Event] = {}

    def given(self, session: str) -> None:
        """Wake the episode of this session, if it waits."""
        if session in self._news:
            self._news[session].set()

    async def wait(self, session: str, enough: Callable[[], bool], until: float) -> bool:
        """Return whether `enough` became true before `until`, on the monotonic clock; each reward asks again."""
        news = self._news[session] = asyncio.Event()
        try:
            while not enough():
                left = until - self._clock.monotonic()
                if left <= 0:
                    return False
                news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK)):
                        await news.wait()
            return True
        finally:
            del self._news[session]
