"""Generalised advantages over a critic's values, whitened over the batch, and the returns that the critic learns.

The reward of a row is on its last trained token, or the rewards of its answers on theirs; the distance from the
reference, where the recipe puts it into the reward, is taken off each token. Tokens that are not trained (a tool's
words) are stepped over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rillflow.config import CriticConfig
from rillflow.trainer.algorithms.advantages import returns
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.functions.columns import rows_of, spread, trained
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Step

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats
    from rillflow.trainer.graph.databuffer import Column


def gae(step: Step, data: Databuffer) -> Mapping[str, Column]:
    critic = step.config.critic or CriticConfig()
    row_T = rows_of(data)
    value_T, return_T = returns.gae(_rewards(step, data), trained(data, "value_N"), row_T, critic.gamma, critic.lam)
    if step.algorithm.whiten is not None:
        value_T = step.algorithm.whiten(value_T, peers=step.peers)
    return {"advantage_N": spread(data, value_T), "return_N": spread(data, return_T)}


def _rewards(step: Step, data: Databuffer) -> Floats:
    if step.config.by_steps:
        reward_T: Floats = np.nan_to_num(trained(data, "step_reward_N"), nan=0.0)
    else:
        reward_T = returns.outcome_rewards(data["reward_R"], rows_of(data))
    return reward_T - trained(data, "kl_N") if "kl_N" in data else reward_T


REGISTRY.add(
    Function(
        "gae",
        "critic",
        "compute",
        gae,
        ("reward_R", "step_reward_N", "mask_N", "value_N", "kl_N?"),
        ("advantage_N", "return_N"),
        scope="batch",
        default=True,
    )
)
