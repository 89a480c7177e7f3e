"""The parts of an algorithm: the tokens that a loss sees, the protocols of losses, and aggregations.

The type of a loss says how much of a batch it must see. A loss of `Tokens` sees each token alone. A loss of `WholeRows`
sees the other tokens of its row, which is always possible because rows are never split. A `BatchLoss` sees the whole
batch once, without gradient, before it becomes the loss of that batch.

An aggregation has two halves, because training may start before the whole batch has arrived: a weight for each token,
which depends on its row alone, and a count that adds up over the batch. The loss of a batch is the sum of weight times
token loss, divided by the count, however the batch is split. Aggregations that count rows leave out rows without
trained tokens (verl's convention; the overlong filter makes such rows). TRL counts them: see `counting_idle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from rillflow.trainer.parallel import Peers

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints, Rows

_LOG_RATIO_BOUND = 20.0


# ---------------------------------------------------------------- what a loss sees


@dataclass(frozen=True)
class Tokens:
    """Trained tokens with their advantages and log-probs.

    `new_T` are log-probs under the weights in training, with gradient; `old_T` those that the engine recorded. Nodes of
    the step may add `proximal_T`, under the weights before the batch's first update, and `reference_T`, of the
    reference model. `entropy_T` has a gradient if the recipe has an entropy bonus. `more` holds every column that nodes
    made, by its name over T.
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
    """All trained tokens of some rows; `row_T` numbers the rows from 0 to `rows` - 1."""

    row_T: torch.Tensor
    rows: int

    def sums(self, value_T: torch.Tensor) -> torch.Tensor:
        """Sum a value over the tokens of each row."""
        return value_T.new_zeros(self.rows).index_add(0, self.row_T, value_T)

    def means(self, value_T: torch.Tensor) -> torch.Tensor:
        return self.sums(value_T) / self.sums(torch.ones_like(value_T)).clamp(min=1)


class Loss(Protocol):
    def __call__(self, tokens: WholeRows, /) -> torch.Tensor:
        """Return the loss of each token, not yet weighted."""

    def held(self, tokens: WholeRows, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens the trust region holds from below, and which from above."""


@runtime_checkable
class BatchLoss(Protocol):
    def fit(self, batch: WholeRows, /, peers: Peers = ...) -> tuple[Loss, dict[str, float]]:
        """Return the loss of this batch and metrics of the fit. Each rank passes its own rows."""


class Whiten(Protocol):
    def __call__(self, value: Floats, *, peers: Peers = ...) -> Floats: ...


def ratio(new_T: torch.Tensor, old_T: torch.Tensor) -> torch.Tensor:
    """Return the importance ratio, bounded so that one token cannot overflow a whole batch."""
    return (new_T - old_T).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()


def none_of(tokens: Tokens) -> torch.Tensor:
    """Return flags that are false for every token."""
    return torch.zeros_like(tokens.new_T, dtype=torch.bool)


# ---------------------------------------------------------------- from token losses to the loss of a batch


@dataclass(frozen=True)
class Aggregation:
    """Two functions of the number of trained tokens in each row.

    `weigh` returns the weight of each token of a row, `count` the rows' share of the divisor of the whole batch.
    """

    weigh: Callable[[Ints], Floats]
    count: Callable[[Ints], int]


def _equal_weights(trained_R: Ints) -> Floats:
    return np.ones(len(trained_R))


def _mean_of_row(trained_R: Ints) -> Floats:
    return 1.0 / np.maximum(trained_R, 1)


def _tokens(trained_R: Ints) -> int:
    return int(trained_R.sum())


def _training_rows(trained_R: Ints) -> int:
    return int((trained_R > 0).sum())


def _all_rows(trained_R: Ints) -> int:
    return len(trained_R)


def counting_idle(aggregation: Aggregation) -> Aggregation:
    """Return the aggregation with rows without trained tokens counted too, if it counts rows."""
    return replace(aggregation, count=_all_rows) if aggregation.count is _training_rows else aggregation


def seq_mean_token_sum_norm(length: float) -> Aggregation:
    """Return sum / (rows * length): all tokens weigh the same, and long batches do not weigh more."""

    def weigh(trained_R: Ints) -> Floats:
        return np.full(len(trained_R), 1.0 / length)

    return Aggregation(weigh=weigh, count=_training_rows)


# All trained tokens of the batch weigh the same.
token_mean = Aggregation(weigh=_equal_weights, count=_tokens)
# All rows weigh the same, and all tokens within a row.
seq_mean_token_mean = Aggregation(weigh=_mean_of_row, count=_training_rows)
# The token losses of a row are added up, so long rows weigh more.
seq_mean_token_sum = Aggregation(weigh=_equal_weights, count=_training_rows)


# ---------------------------------------------------------------- the composition


@dataclass(frozen=True)
class Algorithm:
    """The parts of an algorithm, ready to run.

    `advantage` returns one number for each row, from the row and the statistics of its group; it is None if a critic
    makes the advantages. With `to_go`, a token is worth the rewards of the tokens from it on. `whiten` rescales the
    advantages of all trained tokens of a batch.
    """

    loss: Loss | BatchLoss
    advantage: Callable[[Rows], Floats] | None
    aggregation: Aggregation
    whiten: Whiten | None = None
    to_go: bool = False
