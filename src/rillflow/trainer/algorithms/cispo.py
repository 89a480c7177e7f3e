"""CISPO: GRPO's advantages, bounded weights instead of a clip, mean over the batch's tokens.

By verl's convention the weight is held in [1 - clip_low, 1 + clip_high], here without a lower bound and with 0.2 above;
by TRL's it is at most clip_high itself, here 5.
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.cispo import CispoLoss
from rillflow.trainer.algorithms.parts import assemble


def cispo(config: TrainerConfig) -> Algorithm:
    if config.convention == "trl":
        loss = CispoLoss.trl(config.clip_high or 5.0)
    else:
        loss = CispoLoss.verl(config.clip_low or 1.0, config.clip_high or 0.2)
    return assemble(config, loss, advantage="grpo", aggregation="token_mean")
