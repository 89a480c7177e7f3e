"""What is taken off the reward of a row before it becomes an advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


def soft_overlong(length_R: Ints, longest: int, margin: int) -> Floats:
    """DAPO's soft punishment: 0 up to `longest` - `margin` tokens, falling to -1 at `longest` and beyond."""
    over_R = (length_R - (longest - margin)) / margin
    return np.negative(np.clip(over_R, 0.0, 1.0))
