"""Advantages: by how much rows, answers or tokens were better than expected. All functions compute in float64.

Arrays over T hold trained tokens only, row after row; `row_T` is the row of each token. Tokens between them that are
not trained (the words of a tool) are absent, so sums along a row skip them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.parallel import Alone, Peers

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints, Rows

_VARIANCE_EPSILON = 1e-8
_STD_EPSILON = 1e-5


# ---------------------------------------------------------------- a row against its group


@dataclass(frozen=True)
class Convention:
    """How one framework treats the corner cases of groups.

    `epsilon` keeps a group of equal scores from a division by zero. With `lone_keeps` a row that is alone in its group
    keeps its score as its advantage; otherwise its advantage is 0.
    """

    epsilon: float
    lone_keeps: bool


# All three use the unbiased std.
CONVENTIONS = {
    "verl": Convention(epsilon=1e-6, lone_keeps=True),
    "trl": Convention(epsilon=1e-4, lone_keeps=False),
    "astraflow": Convention(epsilon=1e-5, lone_keeps=False),
}


@dataclass(frozen=True)
class Groups:
    """The statistics of each row's group. `std_R` is the population's std, as the ledger gives it."""

    mean_R: Floats
    std_R: Floats
    size_R: Ints

    @classmethod
    def of(cls, score_R: Floats, group_R: Ints) -> Groups:
        """Compute the statistics over rows with the same number in `group_R`."""
        _, of_R, size_G = np.unique(group_R, return_inverse=True, return_counts=True)
        mean_G = np.bincount(of_R, score_R) / size_G
        var_G = np.bincount(of_R, (score_R - mean_G[of_R]) ** 2) / size_G
        return cls(mean_G[of_R], np.sqrt(var_G)[of_R], size_G[of_R])

    @classmethod
    def of_rows(cls, rows: Rows) -> Groups:
        return cls(rows.group_mean_R, rows.group_std_R, rows.group_size_R)


def centred(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """Dr.GRPO: score - mean, without a division."""
    keeps_R = (groups.size_R <= 1) & convention.lone_keeps
    return score_R - np.where(keeps_R, 0.0, groups.mean_R)


def normalised(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """GRPO: (score - mean) / (std + epsilon)."""
    widen_R = np.sqrt(groups.size_R / np.maximum(groups.size_R - 1, 1))
    std_R = np.where(groups.size_R <= 1, 1.0, groups.std_R * widen_R)
    advantage_R: Floats = centred(score_R, groups, convention) / (std_R + convention.epsilon)
    return advantage_R


def leave_one_out(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """RLOO: score - mean of the others, which is n / (n - 1) times score - mean of all."""
    widen_R = np.where(groups.size_R <= 1, 1.0, groups.size_R / np.maximum(groups.size_R - 1, 1))
    advantage_R: Floats = centred(score_R, groups, convention) * widen_R
    return advantage_R


# ---------------------------------------------------------------- rewards of single answers


def step_advantages(
    reward_T: Floats,
    row_T: Ints,
    group_R: Ints,
    convention: Convention,
    *,
    to_go: bool = False,
    compare: Callable[[Floats, Ints], Groups] = Groups.of,
) -> Floats:
    """Turn rewards of single answers (a process reward model's scores) into advantages of tokens.

    `reward_T` has a number at the token that ends a rewarded answer and NaN elsewhere. A token belongs to the first
    rewarded answer that ends at it or after it in its row; tokens behind the last one have advantage 0. Answers are
    normalised over all rewarded answers of their group: `compare` gets their scores and groups. With `to_go` a token
    gets the sum of its own answer's value and all later ones of its row (GRPO's process supervision).
    """
    at_S = np.flatnonzero(~np.isnan(reward_T))
    value_T = np.zeros(len(reward_T))
    score_S = reward_T[at_S]
    value_T[at_S] = normalised(score_S, compare(score_S, group_R[row_T[at_S]]), convention)
    if not len(at_S):
        return value_T
    if to_go:
        return returns_to_go(value_T, row_T)
    next_T = np.searchsorted(at_S, np.arange(len(reward_T)))
    answer_T = at_S[np.minimum(next_T, len(at_S) - 1)]
    belongs_T = (next_T < len(at_S)) & (row_T[answer_T] == row_T)
    return np.where(belongs_T, value_T[answer_T], 0.0)


# ---------------------------------------------------------------- returns and GAE


def outcome_rewards(score_R: Floats, row_T: Ints) -> Floats:
    """Put each row's score on its last trained token, 0 elsewhere."""
    reward_T = np.zeros(len(row_T))
    last_T = np.append(row_T[1:] != row_T[:-1], True)[: len(row_T)]
    reward_T[last_T] = score_R[row_T[last_T]]
    return reward_T


def returns_to_go(reward_T: Floats, row_T: Ints, gamma: float = 1.0) -> Floats:
    """Return the discounted sum of each token's reward and those after it: REINFORCE++ before whitening."""
    return_T = np.zeros(len(row_T))
    after_R = np.zeros(int(row_T.max(initial=-1)) + 1)
    for at in _from_the_end(row_T):
        return_T[at] = after_R[row_T[at]] = reward_T[at] + gamma * after_R[row_T[at]]
    return return_T


def gae(reward_T: Floats, value_T: Floats, row_T: Ints, gamma: float = 1.0, lam: float = 1.0) -> tuple[Floats, Floats]:
    """Return generalised advantages, not yet whitened, and the returns for the critic: advantage + value."""
    advantage_T = np.zeros(len(row_T))
    rows = int(row_T.max(initial=-1)) + 1
    value_after_R, advantage_after_R = np.zeros(rows), np.zeros(rows)
    for at in _from_the_end(row_T):
        of = row_T[at]
        surprise = reward_T[at] + gamma * value_after_R[of] - value_T[at]
        advantage_T[at] = advantage_after_R[of] = surprise + gamma * lam * advantage_after_R[of]
        value_after_R[of] = value_T[at]
    return advantage_T, advantage_T + value_T


def _from_the_end(row_T: Ints) -> Iterator[Ints]:
    """Yield the last token of every row, then the token before it in every row that has one, and so on."""
    _, start_R, length_R = np.unique(row_T, return_index=True, return_counts=True)
    for back in range(1, int(length_R.max(initial=0)) + 1):
        longer_R = length_R >= back
        yield (start_R + length_R - back)[longer_R]


# ---------------------------------------------------------------- whitening over the batch, and length


def whiten(value: Floats, *, peers: Peers = Alone()) -> Floats:
    """Return (x - mean) / sqrt(var + 1e-8) over all ranks, with the unbiased variance, as verl does.

    Fewer than two tokens become 0.
    """
    total, mean, variance = _moments(value, peers)
    unbiased = variance * total / max(total - 1, 1)
    whitened: Floats = (value - mean) / np.sqrt(unbiased + _VARIANCE_EPSILON)
    return whitened


def standardise(value: Floats, *, peers: Peers = Alone()) -> Floats:
    """Return (x - mean) / (std + 1e-5) over all ranks, with the population's std, as AstraFlow does."""
    _, mean, variance = _moments(value, peers)
    standardised: Floats = (value - mean) / (np.sqrt(variance) + _STD_EPSILON)
    return standardised


def _moments(value: Floats, peers: Peers) -> tuple[float, float, float]:
    """Return the number of values on all ranks, their mean and the population's variance."""
    total, added = peers.total([float(len(value)), float(value.sum())])
    mean = added / max(total, 1.0)
    (squared,) = peers.total([float(((value - mean) ** 2).sum())])
    return total, mean, squared / max(total, 1.0)


def soft_overlong(length_R: Ints, longest: int, margin: int) -> Floats:
    """Return DAPO's soft punishment: 0 up to `longest` - `margin` tokens, falling to -1 at `longest` and beyond."""
    over_R = (length_R - (longest - margin)) / margin
    return np.negative(np.clip(over_R, 0.0, 1.0))
