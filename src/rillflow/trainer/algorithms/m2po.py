"""M2PO: GRPO's advantages, clip bounds from the batch's second moment (AstraFlow), mean over the batch's tokens.

The variant `mask` (AReaL) keeps an ordinary clip of 0.2 and drops the tokens that drifted most.
"""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm, BatchLoss
from rillflow.trainer.algorithms.losses.m2po import M2poClip, M2poMask
from rillflow.trainer.algorithms.parts import assemble, dual_of, own_clip


def m2po(config: TrainerConfig) -> Algorithm:
    threshold = config.m2_threshold or 0.01
    masked = config.m2_variant == "mask"
    loss: BatchLoss = (
        M2poMask(threshold, own_clip(config, 0.2, 0.2)) if masked else M2poClip(threshold, dual_of(config))
    )
    return assemble(config, loss, advantage="grpo", aggregation="token_mean")
