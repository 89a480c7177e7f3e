"""M2PO: a trust region from the batch's second moment of the log-ratio, so that stale batches are clipped as little as
their staleness allows.

Both variants find the largest second moment such that it and all smaller ones have a mean under the threshold.
`M2poClip` considers the tokens that the clip can hold and turns that moment into clip bounds. `M2poMask` considers all
tokens and drops those above it from the loss; dropped tokens still count in the loss's divisor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from rillflow.trainer.algorithms.common import Tokens, WholeRows
from rillflow.trainer.algorithms.losses.clip import Clip, ClippedLoss
from rillflow.trainer.parallel import Alone, Peers

WIDEST_LOW, WIDEST_HIGH = 0.95, 20.0
# The bounds lie this far beyond the token that they are made from, so that its own rounding in fp32 does not clip it.
_ROUNDING = 2e-6


def moments(tokens: Tokens) -> torch.Tensor:
    return (tokens.new_T.detach() - tokens.old_T).square()


def highest_kept(moment_T: torch.Tensor, threshold: float, peers: Peers = Alone()) -> float:
    """Return the largest moment that is kept. The smallest moment of all ranks always is; there must be one.

    The search is a bisection over the doubles: the mean grows with the number of moments that are kept. Ranks exchange
    only a count and a sum, never tokens.
    """
    ascending_T = moment_T.double().sort().values.cpu().numpy()
    sum_T = np.concatenate([[0.0], np.cumsum(ascending_T)])

    def stays(moment: float) -> bool:
        below = int(np.searchsorted(ascending_T, moment))
        count, added = peers.total([below, sum_T[below]])
        return (added + moment) / (count + 1) < threshold

    lowest = -peers.highest([-ascending_T[0] if len(ascending_T) else -np.inf])[0]
    highest = peers.highest([ascending_T[-1] if len(ascending_T) else -np.inf])[0]
    kept, dropped = _bits(lowest), _bits(highest) + 1
    while dropped - kept > 1:
        middle = (kept + dropped) // 2
        kept, dropped = (middle, dropped) if stays(_double(middle)) else (kept, middle)
    among = np.searchsorted(ascending_T, _double(kept), side="right")
    return peers.highest([ascending_T[among - 1] if among else -np.inf])[0]


def _bits(value: float) -> int:
    """Return the bits as an integer, which has the order of the doubles if none is negative."""
    return int(np.float64(value).view(np.int64))


def _double(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


def _mean(value_T: torch.Tensor, peers: Peers) -> tuple[float, float]:
    """Return the mean over all ranks and the number of values."""
    total, count = peers.total([float(value_T.double().sum()), len(value_T)])
    return total / max(count, 1.0), count


@dataclass(frozen=True)
class M2poClip:
    threshold: float
    dual: float | None = None

    def fit(self, batch: WholeRows, peers: Peers = Alone()) -> tuple[ClippedLoss, dict[str, float]]:
        drift_T = (batch.new_T.detach() - batch.old_T) * batch.advantage_T.sign()
        moment_T = moments(batch)[drift_T > 0]
        mean, _ = _mean(moment_T, peers)
        clip = Clip(WIDEST_LOW, WIDEST_HIGH, self.dual)
        if mean > self.threshold:
            tau = math.sqrt(highest_kept(moment_T, self.threshold, peers)) + _ROUNDING
            clip = Clip(min(-math.expm1(-tau), WIDEST_LOW), min(math.expm1(tau), WIDEST_HIGH), self.dual)
        return ClippedLoss(clip), {"m2": mean, "m2_clip_low": clip.low, "m2_clip_high": clip.high}


@dataclass(frozen=True)
class MaskedLoss:
    """The clipped loss of the tokens whose second moment is at most `highest`, 0 for the others."""

    clipped: ClippedLoss
    highest: float

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

    def fit(self, batch: WholeRows, peers: Peers = Alone()) -> tuple[MaskedLoss, dict[str, float]]:
        moment_T = moments(batch)
        mean, count = _mean(moment_T, peers)
        if not count:
            return MaskedLoss(ClippedLoss(self.clip), 0.0), {}
        highest = highest_kept(moment_T, self.threshold, peers)
        kept, _ = _mean(moment_T <= highest, peers)
        return MaskedLoss(ClippedLoss(self.clip), highest), {"m2": mean, "m2_kept": kept}
