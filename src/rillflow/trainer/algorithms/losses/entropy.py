"""A bonus for undecided policies, token by token: it is aggregated as the loss is (verl's convention; TRL always takes
its mean over the tokens, which is the same under `token_mean`)."""

from __future__ import annotations

import torch


def entropies(logits_TV: torch.Tensor) -> torch.Tensor:
    """Of the distribution at each token, with gradient."""
    all_TV = torch.log_softmax(logits_TV, -1)
    return -(all_TV.exp() * all_TV).sum(-1)


def with_entropy_bonus(loss_T: torch.Tensor, entropy_T: torch.Tensor, factor: float) -> torch.Tensor:
    return loss_T - factor * entropy_T
