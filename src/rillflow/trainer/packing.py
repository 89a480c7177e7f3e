"""Rows become padded micro-batches under a budget of tokens.

Invariants: every row that trains is in exactly one micro-batch; the same rows give the same micro-batches; only a
micro-batch of one row may pass the budget. Padding is on the right, after every real token: a causal model's outputs
at real tokens do not depend on it, so no attention mask is needed and the fast causal kernels can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints

# A micro-batch with an eighth of the budget keeps the device busy; from there on padding costs more than a new one.
_WELL_FILLED = 8
_SHORT = 0.85


@dataclass(frozen=True)
class Plan:
    """A part of a batch with all that is fixed before its first micro-batch. `input_R` is `input_length(rows)`."""

    rows: Rows
    input_R: Ints
    advantage_R: Floats
    weight_R: Floats


@dataclass(frozen=True)
class MicroBatch:
    """`select_T` indexes the flattened [B * L] positions whose logits predict the trained `target_T`; `row_T` counts
    the micro-batch's rows."""

    tokens_BL: torch.Tensor
    select_T: torch.Tensor
    row_T: torch.Tensor
    target_T: torch.Tensor
    old_T: torch.Tensor
    temperature_T: torch.Tensor
    advantage_T: torch.Tensor
    weight_T: torch.Tensor


def input_length(rows: Rows) -> Ints:
    """How many tokens of each row the model must read: those before the last trained one. 0: nothing to train."""
    at_N = np.arange(len(rows.mask_N)) - np.repeat(rows.start_R, rows.length_R)
    return np.maximum.reduceat(np.where(rows.mask_N, at_N, 0), rows.start_R).astype(np.int64)


def pack(length_R: Ints, budget: int, *, in_order: bool = False) -> list[Ints]:
    """Row numbers of each micro-batch, longest rows first so that little is padded, or in the rows' own order.

    Rows of length 0 are left out.
    """
    order = np.arange(len(length_R)) if in_order else np.argsort(-length_R, kind="stable")
    packs: list[list[int]] = []
    longest = 0
    for row in order[length_R[order] > 0].tolist():
        length = int(length_R[row])
        longest = max(longest, length)
        if packs and _fits(len(packs[-1]), longest, length, budget, in_order):
            packs[-1].append(row)
        else:
            packs.append([row])
            longest = length
    return [np.array(rows, dtype=np.int64) for rows in packs]


def _fits(count: int, longest: int, length: int, budget: int, in_order: bool) -> bool:
    """Whether one more row goes into a micro-batch of `count` rows; a well-filled one takes no much shorter rows."""
    wasteful = not in_order and length < _SHORT * longest and count * longest * _WELL_FILLED >= budget
    return (count + 1) * longest <= budget and not wasteful


def collate(plan: Plan, index_B: Ints, device: torch.device) -> MicroBatch:
    """The micro-batch of the rows `index_B`, on the device."""
    rows, input_R = plan.rows, plan.input_R
    at_BL = np.arange(input_R[index_B].max())[None, :] + rows.start_R[index_B, None]
    real_BL = at_BL < (rows.start_R + input_R)[index_B, None]
    at_BL = np.where(real_BL, at_BL, 0)
    tokens_BL = np.where(real_BL, rows.tokens_N[at_BL], 0).astype(np.int64)
    row_T, column_T = np.nonzero(real_BL & rows.mask_N[at_BL + 1])
    source_T = at_BL[row_T, column_T] + 1
    of_T = index_B[row_T]
    return MicroBatch(
        tokens_BL=torch.from_numpy(tokens_BL).to(device),
        select_T=torch.from_numpy(row_T * tokens_BL.shape[1] + column_T).to(device),
        row_T=torch.from_numpy(row_T).to(device),
        target_T=torch.from_numpy(rows.tokens_N[source_T].astype(np.int64)).to(device),
        old_T=torch.from_numpy(rows.old_N[source_T]).to(device),
        temperature_T=torch.from_numpy(rows.temperature_N[source_T]).to(device),
        advantage_T=torch.from_numpy(plan.advantage_R[of_T].astype(np.float32)).to(device),
        weight_T=torch.from_numpy(plan.weight_R[of_T].astype(np.float32)).to(device),
    )
