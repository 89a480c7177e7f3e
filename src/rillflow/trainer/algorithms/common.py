"""What the algorithms share: group advantages, the importance ratio, the clipped loss, and aggregation.

Aggregation is a weight for each token, fixed from the totals of the whole batch before the first micro-batch: the
loss of a batch is the plain sum of weight times token loss, however the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints

_LOG_RATIO_BOUND = 20.0
_STD_EPSILON = 1e-6


@dataclass(frozen=True)
class Clip:
    """The ratio is held in [1 - low, 1 + high]; where the advantage is negative the loss is at most -A * dual."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True)
class Algorithm:
    """`advantage` gives one number a row; `weigh` turns trained tokens a row into the weight of each token of it."""

    clip: Clip
    advantage: Callable[[Rows], Floats]
    weigh: Callable[[Ints], Floats]

    def loss(self, new_T: torch.Tensor, old_T: torch.Tensor, advantage_T: torch.Tensor) -> torch.Tensor:
        """The loss of each token, not yet weighted. `old_T` are the log-probs the engine recorded."""
        return clipped_surrogate(ratio(new_T, old_T), advantage_T, self.clip)


def group_advantage(rows: Rows) -> Floats:
    """(reward - mean) / (std + 1e-6) of the group, by verl's convention: unbiased std, a singleton's A is its reward.

    The ledger gives the population's std; it is widened by sqrt(n / (n - 1)).
    """
    size_R = rows.group_size_R
    alone_R = size_R <= 1
    unbiased_R = rows.group_std_R * np.sqrt(size_R / np.maximum(size_R - 1, 1))
    mean_R = np.where(alone_R, 0.0, rows.group_mean_R)
    std_R = np.where(alone_R, 1.0, unbiased_R)
    advantage_R: Floats = (rows.reward_R - mean_R) / (std_R + _STD_EPSILON)
    return advantage_R


def ratio(new_T: torch.Tensor, old_T: torch.Tensor) -> torch.Tensor:
    """The importance ratio; the bound keeps one token from overflowing a whole batch."""
    return (new_T - old_T).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()


def clipped_surrogate(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> torch.Tensor:
    """PPO's pessimistic bound, with the dual clip for negative advantages."""
    plain_T = -advantage_T * ratio_T
    held_T = -advantage_T * ratio_T.clamp(1 - clip.low, 1 + clip.high)
    worst_T = torch.maximum(plain_T, held_T)
    return torch.where(advantage_T < 0, torch.minimum(worst_T, -advantage_T * clip.dual), worst_T)


def token_mean(trained_R: Ints) -> Floats:
    """Every trained token of the batch counts the same."""
    return np.full(len(trained_R), 1.0 / max(int(trained_R.sum()), 1))


def seq_mean_token_mean(trained_R: Ints) -> Floats:
    """Every row that trains counts the same, and every token within its row; rows that train nothing do not count."""
    return 1.0 / (max(int((trained_R > 0).sum()), 1) * np.maximum(trained_R, 1))
