"""The attention of a forest as a few passes over packed tokens, without a mask.

In depth-first order a segment's descendants follow it without a gap. So each token's attention has two parts: its own
segment, causally, and each of its ancestors, in full. A *pass* computes one such part for many tokens, spans of queries
against spans of keys: the first pass has every segment against itself, pass d + 1 the descendants of segments of depth
d against those segments. Results are joined by their log-sum-exps (`joined.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.packing import Layout

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints


@dataclass(frozen=True)
class Pass:
    """Span c has `query_C[c]` queries, which begin at `query_at_C[c]` of the packed tokens, and `key_C[c]` keys, which
    begin at `key_at_C[c]`. The first pass is causal and covers all tokens; its queries and keys are the same.
    """

    query_C: Ints
    key_C: Ints
    query_at_C: Ints
    key_at_C: Ints


def subtree_ends(layout: Layout) -> Ints:
    """Return the end in P of each segment's descendants."""
    end_S = layout.start_S + layout.length_S
    for segment in range(len(end_S) - 1, -1, -1):
        parent = layout.parent_S[segment]
        if parent >= 0:
            end_S[parent] = max(end_S[parent], end_S[segment])
    return end_S


def passes(layout: Layout) -> list[Pass]:
    own = Pass(layout.length_S, layout.length_S, layout.start_S, layout.start_S)
    if (layout.parent_S < 0).all():
        return [own]
    after_S = layout.start_S + layout.length_S
    hanging_S = subtree_ends(layout) - after_S
    depth_S = _depths(layout.parent_S)
    made = [own]
    for depth in range(int(depth_S.max())):
        at = np.flatnonzero((depth_S == depth) & (hanging_S > 0))
        made.append(Pass(hanging_S[at], layout.length_S[at], after_S[at], layout.start_S[at]))
    return made


def _depths(parent_S: Ints) -> Ints:
    depth_S = np.zeros_like(parent_S)
    for segment, parent in enumerate(parent_S.tolist()):
        if parent >= 0:
            depth_S[segment] = depth_S[parent] + 1
    return depth_S
