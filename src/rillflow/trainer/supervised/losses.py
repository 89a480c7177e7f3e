"""What supervised training minimises, on scores as arrays, and the numbers that say how good scores are.

Pairs (Bradley and Terry): the mean over pairs of -log sigmoid(chosen - rejected - margin) + centring * (chosen +
rejected)^2, as TRL's RewardTrainer has it. Steps: binary cross-entropy of the sigmoid of the score against the label,
or their squared difference, the mean over all steps. Answers: the negative log-likelihood, the mean over all trained
tokens, as transformers has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats


def pair_losses(chosen_G: Floats, rejected_G: Floats, margin_G: Floats, centring: float) -> Floats:
    """The loss of each pair."""
    # -log sigmoid(x) without overflow.
    loss_G: Floats = np.logaddexp(0.0, -(chosen_G - rejected_G - margin_G))
    return loss_G + centring * (chosen_G + rejected_G) ** 2


def pair_slopes(
    chosen_G: Floats, rejected_G: Floats, margin_G: Floats, centring: float
) -> tuple[Floats, Floats]:  # fmt: skip
    """The derivatives of each pair's loss by its two scores."""
    pull_G = -np.exp(-np.logaddexp(0.0, chosen_G - rejected_G - margin_G))
    centre_G = 2 * centring * (chosen_G + rejected_G)
    return pull_G + centre_G, -pull_G + centre_G


def step_losses(score_T: torch.Tensor, label_T: torch.Tensor, kind: str) -> torch.Tensor:
    """The loss of each step."""
    if kind == "mse":
        return functional.mse_loss(score_T, label_T, reduction="none")
    return functional.binary_cross_entropy_with_logits(score_T, label_T, reduction="none")


def correlation(a: Floats, b: Floats) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if len(a) < 2 or not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def area_under_curve(score: Floats, good: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float:
    """How often a good one has a higher score than a bad one, ties counting half; 0.5 where one kind is missing."""
    positive, negative = int(good.sum()), int((~good).sum())
    if not positive or not negative:
        return 0.5
    order = np.argsort(score, kind="stable")
    _, first, counts = np.unique(score[order], return_index=True, return_counts=True)
    rank = np.empty(len(score))
    rank[order] = np.repeat(first + (counts + 1) / 2, counts)
    return float((rank[good].sum() - positive * (positive + 1) / 2) / (positive * negative))
