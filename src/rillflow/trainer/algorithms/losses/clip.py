"""PPO's clipped surrogate, with dual clip, and the clipped loss of its critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, ratio


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio, [1 - low, 1 + high]. For negative advantages the loss is at most -A * dual."""

    low: float
    high: float
    dual: float | None = None


def clipped_surrogate(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Return PPO's pessimistic bound, with the dual clip for negative advantages."""
    plain_T = -advantage_T * ratio_T
    worst_T = torch.maximum(plain_T, -advantage_T * ratio_T.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual is None:
        return worst_T
    return torch.where(advantage_T < 0, torch.minimum(worst_T, -advantage_T * clip.dual), worst_T)


def clipped_flags(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the clip removes the gradient: from below, and from above."""
    return (ratio_T < 1 - clip.low) & (advantage_T < 0), (ratio_T > 1 + clip.high) & (advantage_T > 0)


@dataclass(frozen=True)
class ClippedLoss:
    clip: Clip

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return clipped_surrogate(ratio(tokens.new_T, tokens.old_T), tokens.advantage_T, self.clip)

    def held(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_flags(ratio(tokens.new_T, tokens.old_T), tokens.advantage_T, self.clip)


def value_loss(new_T: torch.Tensor, old_T: torch.Tensor, return_T: torch.Tensor, bound: float = 0.5) -> torch.Tensor:
    """Return half the squared error of a critic's value, or of its clipped move, whichever is larger.

    `new_T` are values with gradient, `old_T` the values that the advantages were made with.
    """
    moved_T = torch.maximum(torch.minimum(new_T, old_T + bound), old_T - bound)
    return 0.5 * torch.maximum((new_T - return_T).square(), (moved_T - return_T).square())
