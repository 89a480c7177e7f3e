"""Places that changes have in common or not, as one list."""

from __future__ import annotations

import numpy as np

from rillflow.weights.delta.format import Array
from rillflow.weights.delta.jit import compiled


@compiled
def union(one_K: Array, other_K: Array) -> Array:
    """What is in either of two ascending lists without repetition, so too."""
    index_K = np.empty(len(one_K) + len(other_K), np.int64)
    end = at = beside = 0
    while at < len(one_K) and beside < len(other_K):
        first, second = one_K[at], other_K[beside]
        index_K[end] = min(first, second)
        end += 1
        at += first <= second
        beside += second <= first
    for rest_K in (one_K[at:], other_K[beside:]):
        for place in rest_K:
            index_K[end] = place
            end += 1
    return index_K[:end]
