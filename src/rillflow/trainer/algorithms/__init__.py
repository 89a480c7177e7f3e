"""Algorithms by the name a recipe gives them: one small file each, put together from `advantages`, `losses` and
`aggregation`."""

from __future__ import annotations

from collections.abc import Callable

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.cispo import cispo
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.dapo import dapo
from rillflow.trainer.algorithms.decoupled_ppo import decoupled_ppo
from rillflow.trainer.algorithms.dr_grpo import dr_grpo
from rillflow.trainer.algorithms.grpo import grpo
from rillflow.trainer.algorithms.gspo import gspo
from rillflow.trainer.algorithms.m2po import m2po
from rillflow.trainer.algorithms.ppo import ppo
from rillflow.trainer.algorithms.reinforce import reinforce
from rillflow.trainer.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from rillflow.trainer.algorithms.rloo import rloo
from rillflow.trainer.algorithms.sapo import sapo

ALGORITHMS: dict[str, Callable[[TrainerConfig], Algorithm]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "m2po": m2po,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "reinforce": reinforce,
    "decoupled_ppo": decoupled_ppo,
    "ppo": ppo,
}

__all__ = ["ALGORITHMS", "Algorithm"]
