"""Attention of a decode step on a CPU in float32: one compiled call a layer, without a mask.

Each row is read alone, as far as it goes, so no bit of what it finds depends on the other rows of a batch. Against the
plain operators this saves the masked columns of shorter rows, a dispatch for each run of rows alike in length, the
scattering of new keys and values, and time in the arithmetic itself: `lanes` says how.

Shape suffixes: R rows, H query heads, A heads of queries, keys and values side by side, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from rillflow.engine.embedded.cache import LANES, Columns, KVCache
from rillflow.engine.embedded.lanes import move, score, soften, weigh
from rillflow.engine.embedded.sampling import Array
from rillflow.weights.delta.jit import compiled

_LOG2_E = 1 / math.log(2)


@cache
def _kernel(group: int, size: int) -> Callable[[int, int, int, Array, Array, int, int, int, float], None]:
    """For `group` query heads of `size` numbers to each kv head: constants of the code, as loops over them must be.

    It takes where the heads of the rows lie, one layer's keys and values, and the results; the columns that each row
    writes and how many it reads; the numbers of slots, kv heads and columns; by how much the products are scaled, for
    powers of two.
    """

    def attend(  # noqa: PLR0917 compiled code takes no names
        heads_at: int, cache_at: int, out_at: int, write_R: Array, length_R: Array,
        slots: int, heads: int, columns: int, scale: float,
    ) -> None:  # fmt: skip
        span = columns + LANES
        scores = np.empty(group * span, np.float32)
        shares = np.empty(group, np.float32)
        half = slots * heads * columns * size  # from a key to its value
        for row in range(len(length_R)):
            count = length_R[row]
            first = row * heads * (group + 2) * size
            for head in range(heads):
                key = (row * heads + head) * columns * size
                new = first + (heads * group + head) * size
                move(heads_at, new, cache_at, key + write_R[row] * size, size)
                move(heads_at, new + heads * size, cache_at, half + key + write_R[row] * size, size)
                score(heads_at, first + head * group * size, cache_at, key, count, scores, span, group, size)
                for member in range(group):
                    shares[member] = 1 / soften(scores, member * span, count, np.float32(scale))
                out = (row * heads + head) * group * size
                weigh(scores, span, shares, cache_at, half + key, count, out_at, out, group, size)

    return compiled(attend)


class DecodeAttention:
    """The one new token of each of the first slots: its key and value go into the cache, its queries find what is
    there. Compiled when it is made.

    Invariant: a result is valid until the next call, which writes into the same memory.
    """

    def __init__(self, cache: KVCache, heads: int, head_size: int) -> None:
        self._cache = cache
        self._kernel = _kernel(heads // cache.heads, head_size)
        self._out = torch.zeros(cache.slots, heads * head_size, dtype=torch.float32)
        self._part = self._out
        nothing = np.zeros(0, np.int64)
        self(0, Columns(nothing, nothing), self._out, 1.0)

    def __call__(self, layer: int, columns: Columns, qkv_RAD: torch.Tensor, scaling: float) -> torch.Tensor:
        """[R, H * D]. Each row writes before it reads, and reads one column at least."""
        assert qkv_RAD.is_contiguous(), "compiled code goes by addresses"
        rows = len(columns.length_R)
        if len(self._part) != rows:
            self._part = self._out[:rows]
        self._kernel(
            qkv_RAD.data_ptr(),
            self._cache.address(layer),
            self._out.data_ptr(),
            *columns,
            *self._cache.sizes,
            scaling * _LOG2_E,
        )
        return self._part
