"""A bonus for undecided policies, token by token: it is aggregated as the loss is (verl's convention; TRL always takes
its mean over the tokens, which is the same under `token_mean`)."""

from __future__ import annotations

import torch


def with_entropy_bonus(loss_T: torch.Tensor, entropy_T: torch.Tensor, factor: float) -> torch.Tensor:
    return loss_T - factor * entropy_T
