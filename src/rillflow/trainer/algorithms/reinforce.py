"""REINFORCE with truncated importance sampling (TIS, bound 2): RLOO's advantages, no clip, mean over rows of sums."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.reinforce import ReinforceLoss
from rillflow.trainer.algorithms.parts import assemble


def reinforce(config: TrainerConfig) -> Algorithm:
    loss = ReinforceLoss(config.weight_bound or 2.0, config.weight_level or "token")
    return assemble(config, loss, advantage="rloo", aggregation="seq_mean_token_sum")
