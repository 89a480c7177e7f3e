"""Decoupled PPO (AReaL): the clip is centred on a proximal policy, whose ratio to the policy that sampled is an
importance weight. Tokens whose weight exceeds the cap have no loss but still count.

With one update for each batch the proximal policy is the policy in training before the update: the ratio is 1 and the
weight carries all of the staleness. With several updates, a node of the step computes the proximal log-probs before the
first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, ratio
from rillflow.trainer.algorithms.losses.clip import Clip, clipped_flags, clipped_surrogate


def decoupled(tokens: Tokens, proximal_T: torch.Tensor, clip: Clip, cap: float | None) -> torch.Tensor:
    """Return the loss of each token; `tokens.old_T` belong to the policy that sampled."""
    weight_T = ratio(proximal_T.detach(), tokens.old_T)
    if cap is not None:
        weight_T = torch.where(weight_T <= cap, weight_T, torch.zeros_like(weight_T))
    return clipped_surrogate(ratio(tokens.new_T, proximal_T.detach()), tokens.advantage_T, clip) * weight_T


@dataclass(frozen=True)
class DecoupledLoss:
    clip: Clip
    cap: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return decoupled(tokens, _proximal(tokens), self.clip, self.cap)

    def held(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that the clip holds; a token over the cap counts as held from above."""
        proximal_T = _proximal(tokens)
        low_T, high_T = clipped_flags(ratio(tokens.new_T, proximal_T), tokens.advantage_T, self.clip)
        return low_T, high_T | (ratio(proximal_T, tokens.old_T) > self.cap)


def _proximal(tokens: Tokens) -> torch.Tensor:
    return tokens.new_T if tokens.proximal_T is None else tokens.proximal_T
