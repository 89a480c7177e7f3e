"""What a model is trained for: from its scores of the trained tokens to a loss, and to what people want to see of it.

Invariant: the loss of an update is the sum of `loss` over its micro-batches, divided by the sum of `count` over its
rows on all ranks; so neither how rows are packed nor who holds them matters. What is measured adds up the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rillflow.trainer.layout import MicroBatch

if TYPE_CHECKING:
    from rillflow.trainer.graph.databuffer import Databuffer
    from rillflow.trainer.parallel.peers import Peers

Measured = tuple[list[torch.Tensor], list[torch.Tensor]]
Seen = tuple[MicroBatch, torch.Tensor]


class Objective:
    """Override `count` and `loss`; the rest where there is more to say.

    `sums` and `peaks` name what `measure` gives: what is added up, and of what the highest counts. With `surveys` the
    learner scores all micro-batches of an update without gradient first, and trains for what `fit` returns.
    """

    sums: tuple[str, ...] = ()
    peaks: tuple[str, ...] = ()
    surveys: bool = False

    def prepare(self, data: Databuffer) -> Databuffer:
        """With the columns that the loss needs and no node makes."""
        return data

    def columns(self, data: Databuffer) -> list[str]:
        """The columns over tokens that a micro-batch carries: all that were made."""
        return [name for name in data.made if name.endswith("_N")]

    def count(self, data: Databuffer) -> float:
        """What these rows add to the number that the loss is divided by."""
        raise NotImplementedError

    def fit(self, seen: Sequence[Seen], device: torch.device, peers: Peers) -> tuple[Objective, dict[str, float]]:
        """What to train for, having seen every score of an update, and what of the fit is worth a metric."""
        return self, {}

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        """The sum over the micro-batch's tokens, with gradient."""
        raise NotImplementedError

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        """What `sums` and `peaks` name; nothing has a gradient here."""
        return [], []

    def later(self, *, again: bool) -> Objective:
        """What is trained for in the updates after a batch's first; `again` where an earlier one had the same rows."""
        return self

    def values(self, sums: dict[str, float], peaks: dict[str, float], tokens: int) -> dict[str, float]:
        """The metrics, from what was measured on all ranks over so many trained tokens."""
        return {}
