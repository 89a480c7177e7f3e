"""SAPO: a sigmoid gate around ratio 1, whose gradient there is that of the ratio, steeper for negative advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, none_of, ratio


@dataclass(frozen=True)
class SapoLoss:
    """`positive` is the gate's temperature where the advantage is positive, `negative` elsewhere."""

    positive: float
    negative: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        tau_T = torch.full_like(tokens.advantage_T, self.negative).masked_fill(tokens.advantage_T > 0, self.positive)
        gate_T = torch.sigmoid(tau_T * (ratio(tokens.new_T, tokens.old_T) - 1)) * (4 / tau_T)
        return -tokens.advantage_T * gate_T

    def held(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return no tokens: the gate closes smoothly."""
        return none_of(tokens), none_of(tokens)
