"""What the algorithms share: group advantages, the importance ratio, the clipped loss, and aggregation.

Aggregation has two halves, because a batch may be trained on before all of it is there: a weight for each token that
its own row fixes, and a count that adds up over the batch. The loss of a batch is the sum of weight times token loss,
divided by the count, however the batch is split and in whatever parts it comes.
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
class Aggregation:
    """Both halves see the trained tokens of each row: `weigh` gives the weight of each token of a row, `count` what
    these rows add to the number that the whole batch is divided by."""

    weigh: Callable[[Ints], Floats]
    count: Callable[[Ints], int]


@dataclass(frozen=True)
class Algorithm:
    """`advantage` gives one number a row, from the row and the statistics of its group alone."""

    clip: Clip
    advantage: Callable[[Rows], Floats]
    aggregation: Aggregation

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


def _ones(trained_R: Ints) -> Floats:
    return np.ones(len(trained_R))


def _tokens(trained_R: Ints) -> int:
    return int(trained_R.sum())


def _one_a_row(trained_R: Ints) -> Floats:
    return 1.0 / np.maximum(trained_R, 1)


def _training_rows(trained_R: Ints) -> int:
    return int((trained_R > 0).sum())


# Every trained token of the batch counts the same.
token_mean = Aggregation(weigh=_ones, count=_tokens)
# Every row that trains counts the same, and every token within its row; rows that train nothing do not count.
seq_mean_token_mean = Aggregation(weigh=_one_a_row, count=_training_rows)
