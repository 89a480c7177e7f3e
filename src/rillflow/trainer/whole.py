"""Micro-batches as a loss sees them, and the whole batch where an algorithm must see all of it first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.algorithms.common import WholeRows
from rillflow.trainer.packing import MicroBatch, Plan

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints


def of_micro(micro: MicroBatch, new_T: torch.Tensor) -> WholeRows:
    return WholeRows(new_T, micro.old_T, micro.advantage_T, micro.row_T, len(micro.tokens_BL))


def joined(parts: Sequence[WholeRows], device: torch.device) -> WholeRows:
    """All of them as one, rows counted on."""
    nothing = torch.zeros(0, device=device)
    several = [WholeRows(nothing, nothing, nothing, nothing.long(), 0), *parts]
    next_P = np.cumsum([part.rows for part in several]).tolist()
    return WholeRows(
        new_T=torch.cat([part.new_T for part in several]),
        old_T=torch.cat([part.old_T for part in several]),
        advantage_T=torch.cat([part.advantage_T for part in several]),
        row_T=torch.cat([part.row_T + after - part.rows for part, after in zip(several, next_P, strict=True)]),
        rows=next_P[-1],
    )


def whitened(plans: Sequence[Plan], whiten: Callable[[Floats, Ints], Floats]) -> list[Plan]:
    """The plans with the advantages of all their rows whitened together, each by its trained tokens."""
    trained = np.concatenate([plan.rows.trained_R for plan in plans])
    white = whiten(np.concatenate([plan.advantage_R for plan in plans]), trained)
    ends = np.cumsum([len(plan.advantage_R) for plan in plans])
    return [replace(plan, advantage_R=white_R) for plan, white_R in zip(plans, np.split(white, ends[:-1]), strict=True)]
