"""Truncated importance weights: what the policy that sampled is away from the one that is meant, bounded above.

They multiply a loss before anything else (a KL term) is added to it, and carry no gradient.
"""

from __future__ import annotations

import torch

from rillflow.trainer.algorithms.common import WholeRows, ratio


def token_weights(meant_T: torch.Tensor, sampled_T: torch.Tensor, bound: float) -> torch.Tensor:
    """Each token for itself: little variance, some bias."""
    return ratio(meant_T.detach(), sampled_T).clamp(max=bound)


def row_weights(rows: WholeRows, meant_T: torch.Tensor, sampled_T: torch.Tensor, bound: float) -> torch.Tensor:
    """The product over the row, on each of its tokens: without bias but for the bound, of much variance."""
    log_R = rows.sums((meant_T - sampled_T).detach())
    return ratio(log_R, torch.zeros_like(log_R)).clamp(max=bound)[rows.row_T]
