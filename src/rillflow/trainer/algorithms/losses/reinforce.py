"""REINFORCE with truncated importance weights: -A lp sg(w), with w = min(new / old, bound) of the token or the row.

The weights are bounded from above and carry no gradient. Other losses use them too (`terms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rillflow.trainer.algorithms.common import WholeRows, none_of, ratio


def token_weights(target_T: torch.Tensor, sampled_T: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the weight of each single token: little variance, some bias."""
    return ratio(target_T.detach(), sampled_T).clamp(max=bound)


def row_weights(rows: WholeRows, target_T: torch.Tensor, sampled_T: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the product over the row on each of its tokens: unbiased below the bound, high variance."""
    log_R = rows.sums((target_T - sampled_T).detach())
    return ratio(log_R, torch.zeros_like(log_R)).clamp(max=bound)[rows.row_T]


@dataclass(frozen=True)
class ReinforceLoss:
    bound: float
    level: Literal["token", "sequence"] = "token"

    def weights(self, tokens: WholeRows) -> torch.Tensor:
        if self.level == "token":
            return token_weights(tokens.new_T, tokens.old_T, self.bound)
        return row_weights(tokens, tokens.new_T, tokens.old_T, self.bound)

    def __call__(self, tokens: WholeRows) -> torch.Tensor:
        return -tokens.advantage_T * tokens.new_T * self.weights(tokens)

    def held(self, tokens: WholeRows) -> tuple[torch.Tensor, torch.Tensor]:
        return none_of(tokens), self.weights(tokens) >= self.bound
