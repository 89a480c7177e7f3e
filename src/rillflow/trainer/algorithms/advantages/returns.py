"""What runs along a row from its end: returns, and generalised advantages over a critic's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


def outcome_rewards(score_R: Floats, row_T: Ints) -> Floats:
    """Each row's score on its last trained token, 0 elsewhere."""
    reward_T = np.zeros(len(row_T))
    last_T = np.append(row_T[1:] != row_T[:-1], True)[: len(row_T)]
    reward_T[last_T] = score_R[row_T[last_T]]
    return reward_T


def returns_to_go(reward_T: Floats, row_T: Ints, gamma: float = 1.0) -> Floats:
    """REINFORCE++ before it is whitened: the discounted sum of a token's reward and those after it."""
    return_T = np.zeros(len(row_T))
    after_R = np.zeros(int(row_T.max(initial=-1)) + 1)
    for at in _from_the_end(row_T):
        return_T[at] = after_R[row_T[at]] = reward_T[at] + gamma * after_R[row_T[at]]
    return return_T


def gae(reward_T: Floats, value_T: Floats, row_T: Ints, gamma: float = 1.0, lam: float = 1.0) -> tuple[Floats, Floats]:
    """Advantages, not yet whitened, and the returns that a critic learns: advantage + value."""
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
    """The last token of every row, then the token before it in every row that has one, and so on."""
    _, start_R, length_R = np.unique(row_T, return_index=True, return_counts=True)
    for back in range(1, int(length_R.max(initial=0)) + 1):
        longer_R = length_R >= back
        yield (start_R + length_R - back)[longer_R]
