"""What every algorithm is made of: advantages, a loss and an aggregation, each a plain function of numbers.

How much of a batch a loss must see is said by its type. One that takes `Tokens` sees each token for itself; one that
takes `WholeRows` sees the other tokens of its row, which is always possible, since rows are never split; a `BatchLoss`
sees the whole batch once, without gradient, before it becomes the loss of that batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from rillflow.trainer.batches import Rows
from rillflow.trainer.parallel.peers import Peers

if TYPE_CHECKING:
    from rillflow.trainer.algorithms.aggregation import Aggregation
    from rillflow.trainer.batches import Floats

_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Tokens:
    """Trained tokens: log-probs `new_T` under the weights in training (with gradient), `old_T` as the engine recorded
    them, and advantages. Where a node of the step has made them: `proximal_T`, under the weights before the batch's
    first update, and `reference_T`, of the reference model. `entropy_T` has a gradient where the recipe wants a bonus.

    `more` has every column that nodes have made, by its name over T.
    """

    new_T: torch.Tensor
    old_T: torch.Tensor
    advantage_T: torch.Tensor
    proximal_T: torch.Tensor | None = field(default=None, kw_only=True)
    reference_T: torch.Tensor | None = field(default=None, kw_only=True)
    entropy_T: torch.Tensor | None = field(default=None, kw_only=True)
    more: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)


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
    def fit(self, batch: WholeRows, /, peers: Peers = ...) -> tuple[Loss, dict[str, float]]:
        """The loss of this batch, of which each rank has its own rows, and what of the fit is worth a metric."""


class Whiten(Protocol):
    def __call__(self, value: Floats, *, peers: Peers = ...) -> Floats: ...


@dataclass(frozen=True)
class Algorithm:
    """`advantage` gives one number a row, from the row and the statistics of its group alone; None where a critic makes
    them. `to_go`: where tokens have rewards of their own, a token is worth those from it on. `whiten` changes the
    advantages of all trained tokens of a batch."""

    loss: Loss | BatchLoss
    advantage: Callable[[Rows], Floats] | None
    aggregation: Aggregation
    whiten: Whiten | None = None
    to_go: bool = False


def ratio(new_T: torch.Tensor, old_T: torch.Tensor) -> torch.Tensor:
    """The importance ratio; the bound keeps one token from overflowing a whole batch."""
    return (new_T - old_T).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()


def none_of(tokens: Tokens) -> torch.Tensor:
    """No token, as flags."""
    return torch.zeros_like(tokens.new_T, dtype=torch.bool)
