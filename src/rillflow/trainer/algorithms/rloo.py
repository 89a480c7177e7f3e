"""RLOO: each reward against the mean of the others in its group, GRPO's clip (verl), mean over the batch's tokens."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.clip import ClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def rloo(config: TrainerConfig) -> Algorithm:
    loss = ClippedLoss(own_clip(config, 0.2, 0.2, 3.0))
    return assemble(config, loss, advantage="rloo", aggregation="token_mean")
