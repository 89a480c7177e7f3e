"""The attention of a forest as a few passes over packed tokens, none of which needs a mask.

In depth-first order everything that hangs on a segment follows it without a gap. So each token's attention falls into
parts: its own segment, causally, and each of its ancestors, in full. A *pass* is one such part for many tokens at
once, spans of queries against spans of keys: the first pass has every segment against itself, pass d + 1 all that hangs
on segments of depth d against those. Their results are joined by their log-sum-exp (`joined.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rillflow.trainer.layout import Layout, runs

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints


@dataclass(frozen=True)
class Pass:
    """Span c has `query_C[c]` queries and `key_C[c]` keys. Spans lie end to end in the packed tokens `query_Q` and
    `key_K` that take part; None: in all of them. The first pass is causal, and queries and keys are the same."""

    query_C: Ints
    key_C: Ints
    query_Q: Ints | None = None
    key_K: Ints | None = None


def subtree_ends(layout: Layout) -> Ints:
    """Where in P that ends which hangs on each segment."""
    end_S = layout.start_S + layout.length_S
    for segment in range(len(end_S) - 1, -1, -1):
        parent = layout.parent_S[segment]
        if parent >= 0:
            end_S[parent] = max(end_S[parent], end_S[segment])
    return end_S


def passes(layout: Layout) -> list[Pass]:
    own = Pass(layout.length_S, layout.length_S)
    if (layout.parent_S < 0).all():
        return [own]
    after_S = layout.start_S + layout.length_S
    hanging_S = subtree_ends(layout) - after_S
    depth_S = _depths(layout.parent_S)
    made = [own]
    for depth in range(int(depth_S.max())):
        at = np.flatnonzero((depth_S == depth) & (hanging_S > 0))
        query_Q = runs(after_S[at], hanging_S[at])
        key_K = runs(layout.start_S[at], layout.length_S[at])
        made.append(Pass(hanging_S[at], layout.length_S[at], query_Q, key_K))
    return made


def _depths(parent_S: Ints) -> Ints:
    depth_S = np.zeros_like(parent_S)
    for segment, parent in enumerate(parent_S.tolist()):
        if parent >= 0:
            depth_S[segment] = depth_S[parent] + 1
    return depth_S
