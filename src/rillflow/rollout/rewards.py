"""What a workflow or a reward function may return: a number, or a mapping of policies to numbers; and what rewards
that were given to a session, or to parts of it, come to.

Invariant: every policy whose tokens an episode trains has a finite reward that somebody gave it; none is made up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from rillflow.errors import RewardError, RillflowError, WorkflowError
from rillflow.gateway.sessions.rewards import Settled
from rillflow.gateway.trees.tree import TokenTree

_NONE_NAMED = "the workflow must return the reward, because the recipe names none"


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
    """Refuse rewards that leave out a policy which has `sampled`: what it did would be trained on a guess."""
    missing = sorted(set(sampled) - set(rewards))
    if missing:
        raise (WorkflowError if answer_is_reward else RewardError)(
            f"the episode sampled from {', '.join(missing)}, but the rewards name only {', '.join(rewards)}",
            "return a reward for every policy that the workflow calls, or one number for all",
        )


def rewards_given(settled: Settled, trees: Mapping[str, TokenTree]) -> dict[str, float]:
    """Of each policy: its session's reward, or the mean of its leaves', or the sum of its answers'; none is absent."""
    rewards: dict[str, float] = {}
    for policy, tree in trees.items():
        leaves = list(settled.leaves.get(policy, {}).values())
        answers = [settled.answers[node.call] for node in tree.nodes() if node.call in settled.answers]
        if policy in settled.session:
            rewards[policy] = settled.session[policy]
        elif leaves:
            rewards[policy] = math.fsum(leaves) / len(leaves)
        elif answers:
            rewards[policy] = math.fsum(answers)
    return rewards


def _finite(value: Any, kind: type[RillflowError], what: str) -> float:
    if not isinstance(value, Real | np.bool_):  # numpy's other scalars are real numbers to Python, too
        raise kind(f"{what}: got {value!r:.80}, not a number")
    if not math.isfinite(value):
        raise RewardError(f"{what} is {value}")
    return float(value)
