"""PPO: advantages from a critic (GAE, whitened), symmetric clip 0.2 with dual clip 3 (verl), mean over the batch's
tokens. The critic learns the returns under a clip of its own (`losses.value`)."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.clip import ClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def ppo(config: TrainerConfig) -> Algorithm:
    if config.advantage is not None:
        raise ConfigError(
            f"ppo's advantages are its critic's, not {config.advantage}",
            "leave trainer.advantage out, or take algorithm: grpo, which has ppo's loss without a critic",
        )
    if config.step_rewards == "own":
        raise ConfigError(
            "under a critic the rewards of answers add up along a row", "give trainer.step_rewards: to_go"
        )
    return assemble(config, ClippedLoss(own_clip(config, 0.2, 0.2, 3.0)), advantage=None, aggregation="token_mean")
