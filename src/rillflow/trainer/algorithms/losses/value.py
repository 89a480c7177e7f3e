"""The critic's loss: half the squared error, of the value itself or of its clipped move, whichever is worse."""

from __future__ import annotations

import torch


def value_loss(new_T: torch.Tensor, old_T: torch.Tensor, return_T: torch.Tensor, bound: float = 0.5) -> torch.Tensor:
    """`new_T` are values with gradient, `old_T` those that the advantages were made with."""
    moved_T = torch.maximum(torch.minimum(new_T, old_T + bound), old_T - bound)
    return 0.5 * torch.maximum((new_T - return_T).square(), (moved_T - return_T).square())
