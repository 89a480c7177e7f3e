"""Rewards of single answers (a process reward model's scores) become advantages of their tokens.

`reward_T` is the `rewards` column at the trained tokens: a number at the token that ends a rewarded answer, NaN
elsewhere. A token belongs to the first rewarded answer that ends at it or after it in its row; behind the last one it
belongs to none and has advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.algorithms.advantages.groups import Convention, Groups, normalised
from rillflow.trainer.algorithms.advantages.returns import returns_to_go

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


def step_advantages(
    reward_T: Floats,
    row_T: Ints,
    group_R: Ints,
    convention: Convention,
    *,
    to_go: bool = False,
    compare: Callable[[Floats, Ints], Groups] = Groups.of,
) -> Floats:
    """Answers are normalised over all rewarded answers of their group: `compare` gets their scores and groups.

    A token has its own answer's value, or, `to_go`, the sum of its own and all later ones of its row (GRPO's process
    supervision).
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
