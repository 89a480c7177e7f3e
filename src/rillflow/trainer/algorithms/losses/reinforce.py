"""REINFORCE under truncated importance weights: -A lp sg(w), with w = min(new / old, bound) of the token or the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rillflow.trainer.algorithms.common import WholeRows, none_of
from rillflow.trainer.algorithms.losses.truncation import row_weights, token_weights


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
