"""DAPO: GRPO's advantages, clip 0.2 / 0.28 (dual clip 10, as verl's recipe), mean over the batch's tokens, no KL.

Its other parts live where they act: dynamic sampling is a filter of the dataflow layer, the overlong filter
(`trainer.overlong_filter`) and the soft punishment (`trainer.overlong`) are nodes before the advantages.
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.clip import ClippedLoss
from rillflow.trainer.algorithms.parts import assemble, own_clip


def dapo(config: TrainerConfig) -> Algorithm:
    loss = ClippedLoss(own_clip(config, 0.2, 0.28, 10.0))
    return assemble(config, loss, advantage="grpo", aggregation="token_mean")
