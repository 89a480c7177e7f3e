"""Dr.GRPO: reward - mean, not divided by the std; the clip of GRPO; the sum over tokens divided by rows times a fixed
length, so that neither easy groups nor long answers weigh differently."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.clip import ClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def dr_grpo(config: TrainerConfig) -> Algorithm:
    loss = ClippedLoss(own_clip(config, 0.2, 0.2, 3.0))
    return assemble(config, loss, advantage="dr_grpo", aggregation="seq_mean_token_sum_norm")
