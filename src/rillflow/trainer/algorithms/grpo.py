"""GRPO: group-normalised advantages, symmetric clip 0.2 with dual clip 3 (verl), mean over rows of token means."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm, Clip, group_advantage, seq_mean_token_mean


def grpo(config: TrainerConfig) -> Algorithm:
    return Algorithm(
        clip=Clip(low=config.clip_low or 0.2, high=config.clip_high or 0.2, dual=3.0),
        advantage=group_advantage,
        aggregation=seq_mean_token_mean,
    )
