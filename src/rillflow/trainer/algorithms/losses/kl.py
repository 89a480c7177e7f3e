"""Estimators of KL(new || reference) on tokens that new has sampled, by their names; x = new - reference.

In a loss they keep their gradient and are added with a factor (`terms`); in a reward they are numbers that are taken
off (the node `kl_reward`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_INPUT_BOUND, _OUTPUT_BOUND = 20.0, 10.0


def k1(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """x: unbiased, of much variance. In a loss its gradient says nothing about the distance."""
    return new_T - reference_T


def k2(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: biased, but in a loss its gradient is that of the KL."""
    return 0.5 * (new_T - reference_T).square()


def k3(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """e^-x + x - 1, unbiased and never negative; bounded as verl does: x by 20, the result by 10."""
    x_T = (new_T - reference_T).clamp(-_INPUT_BOUND, _INPUT_BOUND)
    return (torch.exp(-x_T) + x_T - 1).clamp(-_OUTPUT_BOUND, _OUTPUT_BOUND)


def k3_unbounded(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """TRL's k3."""
    x_T = new_T - reference_T
    return torch.exp(-x_T) + x_T - 1


KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1, "k2": k2, "k3": k3, "k3_unbounded": k3_unbounded,
}  # fmt: skip
