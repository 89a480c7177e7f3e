"""CISPO: -sg(clamp(r)) A lp. The weight of a token is bounded, but every token keeps a gradient.

verl bounds the ratio by [1 - low, 1 + high], TRL by an absolute upper bound alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, ratio


@dataclass(frozen=True)
class CispoLoss:
    """`lowest` and `highest` bound the ratio itself."""

    lowest: float
    highest: float

    @classmethod
    def verl(cls, low: float, high: float) -> CispoLoss:
        return cls(1 - low, 1 + high)

    @classmethod
    def trl(cls, high: float) -> CispoLoss:
        return cls(0.0, high)

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        weight_T = ratio(tokens.new_T.detach(), tokens.old_T).clamp(self.lowest, self.highest)
        return -weight_T * tokens.advantage_T * tokens.new_T

    def held(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ratio_T = ratio(tokens.new_T, tokens.old_T)
        return ratio_T < self.lowest, ratio_T > self.highest
