"""Algorithms by the name a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.common import Algorithm
from rillflow.trainer.algorithms.dapo import dapo
from rillflow.trainer.algorithms.grpo import grpo

ALGORITHMS: dict[str, Callable[[TrainerConfig], Algorithm]] = {"grpo": grpo, "dapo": dapo}

__all__ = ["ALGORITHMS", "Algorithm"]
