"""A row's score against those of its group.

The oracles differ in what a row without company is worth, and in what keeps a group of equal scores from a division
by zero: `CONVENTIONS` names both. The std is the unbiased one in all of them. A recipe says by `lone_rows` what a row
without company is worth to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


@dataclass(frozen=True)
class Convention:
    """`lone_keeps`: a row alone in its group keeps its score as its advantage; otherwise its advantage is 0."""

    epsilon: float
    lone_keeps: bool


CONVENTIONS = {
    "verl": Convention(epsilon=1e-6, lone_keeps=True),
    "trl": Convention(epsilon=1e-4, lone_keeps=False),
    "astraflow": Convention(epsilon=1e-5, lone_keeps=False),
}


@dataclass(frozen=True)
class Groups:
    """The statistics of each row's group; `std_R` is the population's, as the ledger gives it."""

    mean_R: Floats
    std_R: Floats
    size_R: Ints

    @classmethod
    def of(cls, score_R: Floats, group_R: Ints) -> Groups:
        """Over rows with the same number in `group_R`."""
        _, of_R, size_G = np.unique(group_R, return_inverse=True, return_counts=True)
        mean_G = np.bincount(of_R, score_R) / size_G
        var_G = np.bincount(of_R, (score_R - mean_G[of_R]) ** 2) / size_G
        return cls(mean_G[of_R], np.sqrt(var_G)[of_R], size_G[of_R])

    @classmethod
    def of_rows(cls, rows: Rows) -> Groups:
        return cls(rows.group_mean_R, rows.group_std_R, rows.group_size_R)


def centred(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """Dr.GRPO: score - mean, not divided by anything."""
    keeps_R = (groups.size_R <= 1) & convention.lone_keeps
    return score_R - np.where(keeps_R, 0.0, groups.mean_R)


def normalised(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """GRPO: (score - mean) / (std + epsilon)."""
    widen_R = np.sqrt(groups.size_R / np.maximum(groups.size_R - 1, 1))
    std_R = np.where(groups.size_R <= 1, 1.0, groups.std_R * widen_R)
    advantage_R: Floats = centred(score_R, groups, convention) / (std_R + convention.epsilon)
    return advantage_R


def leave_one_out(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """RLOO: score - mean of the others, which is n / (n - 1) times score - mean of all."""
    widen_R = np.where(groups.size_R <= 1, 1.0, groups.size_R / np.maximum(groups.size_R - 1, 1))
    advantage_R: Floats = centred(score_R, groups, convention) * widen_R
    return advantage_R
