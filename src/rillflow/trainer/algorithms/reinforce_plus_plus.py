"""REINFORCE++: returns whitened over the whole batch instead of a critic or a group; clip and mean as verl's.

With the baseline, the mean of the group is taken off before.
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.clip import ClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def reinforce_plus_plus(config: TrainerConfig) -> Algorithm:
    return _whitened(config, "reinforce_plus_plus")


def reinforce_plus_plus_baseline(config: TrainerConfig) -> Algorithm:
    return _whitened(config, "reinforce_plus_plus_baseline")


def _whitened(config: TrainerConfig, advantage: str) -> Algorithm:
    loss = ClippedLoss(own_clip(config, 0.2, 0.2, 3.0))
    return assemble(config, loss, advantage=advantage, aggregation="token_mean")
