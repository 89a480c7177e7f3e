"""What is taken off a reward before it becomes an advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


def soft_overlong(length_R: Ints, longest: int, margin: int) -> Floats:
    """DAPO's soft punishment: 0 up to `longest` - `margin` tokens, falling to -1 at `longest` and beyond."""
    over_R = (length_R - (longest - margin)) / margin
    return np.negative(np.clip(over_R, 0.0, 1.0))


def kl_in_reward(reward_T: Floats, kl_T: Floats, beta: float) -> Floats:
    """Each token pays for its distance from the reference. `kl_T` is one of `losses.kl`, without gradient."""
    return reward_T - beta * kl_T
