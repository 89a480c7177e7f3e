"""Micro-batches as a loss sees them, and all of them as one where an algorithm must see the whole batch first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rillflow.trainer.algorithms.common import WholeRows
from rillflow.trainer.layout import MicroBatch


def of_micro(micro: MicroBatch, new_T: torch.Tensor, entropy_T: torch.Tensor | None = None) -> WholeRows:
    """Tokens whose advantage no node has made have none."""
    columns = micro.columns
    return WholeRows(
        new_T,
        columns["old_T"],
        columns.get("advantage_T", torch.zeros_like(columns["old_T"])),
        micro.row_T,
        micro.rows,
        proximal_T=columns.get("proximal_T"),
        reference_T=columns.get("reference_T"),
        entropy_T=entropy_T,
        more=columns,
    )


def joined(parts: Sequence[WholeRows], device: torch.device) -> WholeRows:
    """All of them as one, rows counted on; of no parts, no tokens. Without `more`."""
    nothing = torch.zeros(0, device=device)
    if not parts:
        return WholeRows(nothing, nothing, nothing, nothing.long(), 0, proximal_T=nothing, reference_T=nothing)
    first = np.cumsum([0, *(part.rows for part in parts)]).tolist()

    def column(name: str) -> torch.Tensor | None:
        of_parts = [getattr(part, name) for part in parts]
        return None if of_parts[0] is None else torch.cat(of_parts)

    return WholeRows(
        torch.cat([part.new_T for part in parts]),
        torch.cat([part.old_T for part in parts]),
        torch.cat([part.advantage_T for part in parts]),
        torch.cat([part.row_T + before for part, before in zip(parts, first[:-1], strict=True)]),
        first[-1],
        proximal_T=column("proximal_T"),
        reference_T=column("reference_T"),
    )
