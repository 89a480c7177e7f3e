"""What every algorithm is made of: advantages, a loss and an aggregation, each a plain function of numbers.

How much of a batch a loss must see is said by its type. One that takes `Tokens` sees each token for itself; one that
takes `WholeRows` sees the other tokens of its row, which is always possible, since rows are never split; a `BatchLoss`
sees the whole batch once, without gradient, before it becomes the loss of that batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    from rillflow.trainer.algorithms.aggregation import Aggregation
    from rillflow.trainer.batches import Floats, Ints

_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Tokens:
    """Trained tokens: log-probs `new_T` under the weights in training (the only ones with a gradient), `old_T` as the
    engine recorded them, and advantages."""

    new_T: torch.Tensor
    old_T: torch.Tensor
    advantage_T: torch.Tensor


@dataclass(frozen=True)
class WholeRows(Tokens):
    """All trained tokens of some rows, which `row_T` counts from 0 to `rows` - 1."""

    row_T: torch.Tensor
    rows: int

    def sums(self, value_T: torch.Tensor) -> torch.Tensor:
        """Over the tokens of each row."""
        return value_T.new_zeros(self.rows).index_add(0, self.row_T, value_T)

    def means(self, value_T: torch.Tensor) -> torch.Tensor:
        return self.sums(value_T) / self.sums(torch.ones_like(value_T)).clamp(min=1)


class Loss(Protocol):
    def __call__(self, tokens: WholeRows, /) -> torch.Tensor:
        """The loss of each token, not yet weighted."""

    def held(self, tokens: WholeRows, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens the trust region holds: from below, from above."""


@runtime_checkable
class BatchLoss(Protocol):
    def fit(self, batch: WholeRows, /) -> tuple[Loss, dict[str, float]]:
        """The loss of this batch, and what of the fit is worth a metric."""


@dataclass(frozen=True)
class Algorithm:
    """`advantage` gives one number a row, from the row and the statistics of its group alone; `whiten` changes those
    of a whole batch, knowing how many tokens of each row are trained."""

    loss: Loss | BatchLoss
    advantage: Callable[[Rows], Floats]
    aggregation: Aggregation
    whiten: Callable[[Floats, Ints], Floats] | None = None


def ratio(new_T: torch.Tensor, old_T: torch.Tensor) -> torch.Tensor:
    """The importance ratio; the bound keeps one token from overflowing a whole batch."""
    return (new_T - old_T).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()


def none_of(tokens: Tokens) -> torch.Tensor:
    """No token, as flags."""
    return torch.zeros_like(tokens.new_T, dtype=torch.bool)
