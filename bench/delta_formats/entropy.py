"""The bound that the sizes of our deltas are measured against."""

from __future__ import annotations

import numpy as np
import torch

from rillflow.kernels.delta.format import Array, Layout, layout_of_pair
from rillflow.weights.fingerprint import bits_of


def bound(base: torch.Tensor, new: torch.Tensor) -> float:
    """Bytes that positions and changes need when each exponent of the old weight has its own ideal code.

    The codes themselves count nothing, so for few or widely spread changes no real format can come near.
    """
    layout = layout_of_pair(base, new)
    old_N, new_N = bits_of(base).astype(np.int64), bits_of(new).astype(np.int64)
    exponent_N = (old_N >> layout.mantissa) & (layout.exponents - 1)
    changed = np.flatnonzero(old_N != new_N)
    size_E = np.bincount(exponent_N, minlength=layout.exponents)
    count_E = np.bincount(exponent_N[changed], minlength=layout.exponents)
    change_K = (_ordered(new_N[changed], layout) - _ordered(old_N[changed], layout)) & ((1 << layout.width) - 1)
    symbol_K = exponent_N[changed] << layout.width | change_K
    positions = _weighted(size_E) - _weighted(count_E) - _weighted(size_E - count_E)
    symbols = _weighted(count_E) - _weighted(np.unique(symbol_K, return_counts=True)[1])
    return (positions + symbols) / 8


def _ordered(bits_K: Array, layout: Layout) -> Array:
    """Numbers in the order of the values, neighbours one apart: what an ULP is counted in."""
    sign = 1 << (layout.width - 1)
    return np.where(bits_K & sign, (2 * sign - 1) ^ bits_K, bits_K | sign)


def _weighted(counts: Array) -> float:
    """Sum of n log2 n."""
    counts = counts[counts > 0].astype(np.float64)
    return float(counts @ np.log2(counts))
