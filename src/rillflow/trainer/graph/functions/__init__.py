"""What the nodes of the built-in graphs run: one small file for each function. Importing this package registers them.

source       fetch, generate: the rows of the batch, part by part
scores       actor_logprobs, reference_logprobs, critic_values: what models say of the trained tokens
rewards      score_reward, punish_overlong, kl_reward, group_statistics: what a reward is before it becomes an advantage
advantages   advantages, batch_advantages: from rewards and the statistics of groups
gae          from rewards and a critic's values, with the returns that the critic learns
train_actor, train_critic, publish
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.graph.functions import (
    advantages,
    gae,
    publish,
    rewards,
    scores,
    source,
    train_actor,
    train_critic,
)

__all__ = [
    "advantages",
    "gae",
    "needs_proximal",
    "publish",
    "rewards",
    "scores",
    "source",
    "train_actor",
    "train_critic",
]


def needs_proximal(config: TrainerConfig) -> bool:
    """Whether the batch is scored under the actor's weights before its first update.

    Losses clip around the log-probs that the engine recorded, which needs no such pass; truncated importance sampling
    sets both apart, and decoupled PPO does once there are updates after the first.
    """
    several = config.updates * config.epochs > 1
    return config.truncate is not None or (config.algorithm == "decoupled_ppo" and several)
