"""DAPO: GRPO's advantages, clip 0.2 / 0.28 (dual clip 10, as verl's recipe), mean over the batch's tokens, no KL.

Its other parts live where they act: dynamic sampling is a filter of the dataflow layer, the overlong filter a setting
of the trainer.
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm, Clip, group_advantage, token_mean


def dapo(config: TrainerConfig) -> Algorithm:
    return Algorithm(
        clip=Clip(low=config.clip_low or 0.2, high=config.clip_high or 0.28, dual=10.0),
        advantage=group_advantage,
        aggregation=token_mean,
    )
