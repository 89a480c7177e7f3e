"""Decoupled PPO (AReaL): the clip is around a proximal policy, and what that one is away from the policy that sampled
is an importance weight on top. Tokens whose weight passes the cap train nothing but still count.

With one update a batch the proximal policy is the one in training, before the update: the ratio is 1 and the weight
carries all of the staleness. With several, a node of the step has its log-probs from before the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import Tokens, ratio
from rillflow.trainer.algorithms.losses.clip import Clip, clipped_flags, clipped_surrogate


def decoupled(tokens: Tokens, proximal_T: torch.Tensor, clip: Clip, cap: float | None) -> torch.Tensor:
    """`tokens.old_T` are of the policy that sampled."""
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
        """By the clip; a token over the cap counts as held from above."""
        proximal_T = _proximal(tokens)
        low_T, high_T = clipped_flags(ratio(tokens.new_T, proximal_T), tokens.advantage_T, self.clip)
        return low_T, high_T | (ratio(proximal_T, tokens.old_T) > self.cap)


def _proximal(tokens: Tokens) -> torch.Tensor:
    return tokens.new_T if tokens.proximal_T is None else tokens.proximal_T
