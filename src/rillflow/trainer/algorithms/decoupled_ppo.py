"""Decoupled PPO (AReaL): GRPO's advantages, clip 0.2, weights capped at 5, mean over the batch's tokens.

The clip is around the weights before the batch's first update: only updates after it (`updates`, `epochs`) reach it.
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.decoupled import DecoupledLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def decoupled_ppo(config: TrainerConfig) -> Algorithm:
    loss = DecoupledLoss(own_clip(config, 0.2, 0.2), config.weight_bound or 5.0)
    return assemble(config, loss, advantage="grpo", aggregation="token_mean")
