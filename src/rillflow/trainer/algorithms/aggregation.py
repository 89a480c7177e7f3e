"""From the losses of tokens to the loss of a batch.

Aggregation has two halves, because a batch may be trained on before all of it is there: a weight for each token that
its own row fixes, and a count that adds up over the batch. The loss of a batch is the sum of weight times token loss,
divided by the count, however the batch is split and in whatever parts it comes.

Where rows are counted, those that train nothing (the overlong filter makes some) are not, by verl's convention; TRL
counts them, and so does what `counting_idle` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


@dataclass(frozen=True)
class Aggregation:
    """Both halves see the trained tokens of each row: `weigh` gives the weight of each token of a row, `count` what
    these rows add to the number that the whole batch is divided by."""

    weigh: Callable[[Ints], Floats]
    count: Callable[[Ints], int]


def _alike(trained_R: Ints) -> Floats:
    return np.ones(len(trained_R))


def _one_a_row(trained_R: Ints) -> Floats:
    return 1.0 / np.maximum(trained_R, 1)


def _tokens(trained_R: Ints) -> int:
    return int(trained_R.sum())


def _training_rows(trained_R: Ints) -> int:
    return int((trained_R > 0).sum())


def _rows(trained_R: Ints) -> int:
    return len(trained_R)


def counting_idle(aggregation: Aggregation) -> Aggregation:
    """The same; where it counts rows, also those that train nothing."""
    return replace(aggregation, count=_rows) if aggregation.count is _training_rows else aggregation


def seq_mean_token_sum_norm(length: float) -> Aggregation:
    """Every trained token counts the same, and no batch more for being long: sum / (rows * length)."""

    def weigh(trained_R: Ints) -> Floats:
        return np.full(len(trained_R), 1.0 / length)

    return Aggregation(weigh=weigh, count=_training_rows)


# Every trained token of the batch counts the same.
token_mean = Aggregation(weigh=_alike, count=_tokens)
# Every row counts the same, and every token within its row.
seq_mean_token_mean = Aggregation(weigh=_one_a_row, count=_training_rows)
# Long rows count more: the losses of a row's tokens are added up.
seq_mean_token_sum = Aggregation(weigh=_alike, count=_training_rows)
