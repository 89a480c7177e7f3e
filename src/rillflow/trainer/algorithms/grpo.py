"""GRPO: group-normalised advantages, symmetric clip 0.2 with dual clip 3 (verl), mean over rows of token means."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.clip import ClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def grpo(config: TrainerConfig) -> Algorithm:
    loss = ClippedLoss(own_clip(config, 0.2, 0.2, 3.0))
    return assemble(config, loss, advantage="grpo", aggregation="seq_mean_token_mean")
