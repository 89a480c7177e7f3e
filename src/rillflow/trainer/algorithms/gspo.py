"""GSPO: GRPO's advantages, one ratio a row held in [1 - 3e-4, 1 + 4e-4], mean over rows of token means."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.gspo import RowClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def gspo(config: TrainerConfig) -> Algorithm:
    loss = RowClippedLoss(own_clip(config, 3e-4, 4e-4))
    return assemble(config, loss, advantage="grpo", aggregation="seq_mean_token_mean")
