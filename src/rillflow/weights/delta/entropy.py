"""The bound that deltas are measured against."""

from __future__ import annotations

import numpy as np
import torch

from rillflow.weights.delta.bits import Array
from rillflow.weights.delta.classes import exponents
from rillflow.weights.delta.file import pair_of_bits
from rillflow.weights.delta.segment import changes


def bound(base: torch.Tensor, new: torch.Tensor) -> float:
    """Bytes that positions and changes need when each exponent of the old weight has its own ideal code.

    The codes themselves count nothing, so for few or widely spread changes no real format can come near.
    """
    layout, old_N, new_N = pair_of_bits(base, new)
    exponent_N = exponents(old_N, layout)
    changed = np.flatnonzero(old_N != new_N)
    size_E = np.bincount(exponent_N, minlength=layout.exponents)
    exponent_K = exponent_N[changed].astype(np.int64)
    count_E = np.bincount(exponent_K, minlength=layout.exponents)
    symbol_K = exponent_K << layout.width | changes(old_N[changed], new_N[changed], layout) + (1 << layout.width - 1)
    positions = _weighted(size_E) - _weighted(count_E) - _weighted(size_E - count_E)
    symbols = _weighted(count_E) - _weighted(np.unique(symbol_K, return_counts=True)[1])
    return (positions + symbols) / 8


def _weighted(counts: Array) -> float:
    """Sum of n log2 n."""
    counts = counts[counts > 0].astype(np.float64)
    return float(counts @ np.log2(counts))
