"""SAPO: GRPO's advantages, a soft gate with temperatures 1.0 and 1.05, mean over rows of token means."""

from __future__ import annotations

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.losses.sapo import SapoLoss
from rillflow.trainer.algorithms.parts import assemble


def sapo(config: TrainerConfig) -> Algorithm:
    loss = SapoLoss(*(config.sapo_tau or (1.0, 1.05)))
    return assemble(config, loss, advantage="grpo", aggregation="seq_mean_token_mean")
