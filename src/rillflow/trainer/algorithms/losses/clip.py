"""PPO's clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, ratio


@dataclass(frozen=True)
class Clip:
    """The ratio is held in [1 - low, 1 + high]; where the advantage is negative the loss is at most -A * dual."""

    low: float
    high: float
    dual: float | None = None


def clipped_surrogate(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> torch.Tensor:
    """PPO's pessimistic bound, with the dual clip for negative advantages."""
    plain_T = -advantage_T * ratio_T
    worst_T = torch.maximum(plain_T, -advantage_T * ratio_T.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual is None:
        return worst_T
    return torch.where(advantage_T < 0, torch.minimum(worst_T, -advantage_T * clip.dual), worst_T)


def clipped_flags(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip takes the gradient away: from below, from above."""
    return (ratio_T < 1 - clip.low) & (advantage_T < 0), (ratio_T > 1 + clip.high) & (advantage_T > 0)


@dataclass(frozen=True)
class ClippedLoss:
    clip: Clip

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return clipped_surrogate(ratio(tokens.new_T, tokens.old_T), tokens.advantage_T, self.clip)

    def held(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_flags(ratio(tokens.new_T, tokens.old_T), tokens.advantage_T, self.clip)
