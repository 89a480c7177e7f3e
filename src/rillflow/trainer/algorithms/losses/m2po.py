"""M2PO: a trust region from the batch's second moment of the log-ratio, so that stale batches are clipped as little as
their staleness allows.

Both variants look for the largest second moment that may stay, such that it and all smaller ones have a mean under the
threshold. `M2poClip` looks at the tokens that the clip can hold and turns that moment into clip bounds. `M2poMask`
looks at all tokens and drops those above it from the loss; they still count in what the loss is divided by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, WholeRows
from rillflow.trainer.algorithms.losses.clip import Clip, ClippedLoss

WIDEST_LOW, WIDEST_HIGH = 0.95, 20.0


def moments(tokens: Tokens) -> torch.Tensor:
    return (tokens.new_T.detach() - tokens.old_T).square()


def highest_kept(moment_T: torch.Tensor, threshold: float) -> torch.Tensor:
    """The smallest moment stays, whatever the threshold. There must be one."""
    ascending_T = moment_T.double().sort().values
    mean_T = ascending_T.cumsum(0) / torch.arange(1, len(moment_T) + 1, device=moment_T.device)
    return ascending_T[max(int((mean_T < threshold).sum()) - 1, 0)]


@dataclass(frozen=True)
class M2poClip:
    threshold: float
    dual: float | None = None

    def fit(self, batch: WholeRows) -> tuple[ClippedLoss, dict[str, float]]:
        drift_T = (batch.new_T.detach() - batch.old_T) * batch.advantage_T.sign()
        moment_T = moments(batch)[drift_T > 0]
        mean = float(moment_T.mean()) if len(moment_T) else 0.0
        clip = Clip(WIDEST_LOW, WIDEST_HIGH, self.dual)
        if mean > self.threshold:
            tau = highest_kept(moment_T, self.threshold).sqrt()
            low, high = -torch.expm1(-tau), torch.expm1(tau)
            clip = Clip(min(float(low), WIDEST_LOW), min(float(high), WIDEST_HIGH), self.dual)
        return ClippedLoss(clip), {"m2": mean, "m2_clip_low": clip.low, "m2_clip_high": clip.high}


@dataclass(frozen=True)
class MaskedLoss:
    """The clipped loss of the tokens whose second moment is at most `highest`; the others have none."""

    clipped: ClippedLoss
    highest: torch.Tensor

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return self.clipped(tokens) * (moments(tokens) <= self.highest)

    def held(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        low_T, high_T = self.clipped.held(tokens)
        dropped_T = moments(tokens) > self.highest
        above_T = tokens.new_T > tokens.old_T
        return low_T | (dropped_T & ~above_T), high_T | (dropped_T & above_T)


@dataclass(frozen=True)
class M2poMask:
    threshold: float
    clip: Clip

    def fit(self, batch: WholeRows) -> tuple[MaskedLoss, dict[str, float]]:
        moment_T = moments(batch)
        if not len(moment_T):
            return MaskedLoss(ClippedLoss(self.clip), moment_T.new_zeros(())), {}
        highest = highest_kept(moment_T, self.threshold)
        kept = float((moment_T <= highest).double().mean())
        return MaskedLoss(ClippedLoss(self.clip), highest), {"m2": float(moment_T.mean()), "m2_kept": kept}
