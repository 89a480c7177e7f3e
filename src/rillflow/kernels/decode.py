"""Attention of a decode step, on a CPU in fp32: one call for each layer, without a mask.

Each row is read alone, as far as it goes, so no bit of its result depends on the other rows of a batch. Against torch's
operator this saves the masked columns of shorter rows, a call for each run of rows alike in length, and the scattering
of new keys and values.

Axes: R rows, S slots, H heads of queries, K heads of keys, A = H + 2 K heads of queries, keys and values side by side,
C columns of the cache, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rillflow.kernels.compile import fastmath
from rillflow.kernels.exponential import exponential

Array = npt.NDArray[Any]
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def attend(
    qkv_RAD: torch.Tensor, keys: Array, values: Array, write_R: Array, length_R: Array, scale: float
) -> torch.Tensor:
    """Write the new keys and values of the first R slots into the columns `write_R` of the cache [S, K, C, D]; return
    what their queries find in the first `length_R` columns, [R, H * D]. Each row writes before it reads, and reads one
    column at least."""
    rows, heads, size = qkv_RAD.shape
    out_RD = qkv_RAD.new_empty(rows, (heads - 2 * keys.shape[1]) * size)
    attend_loop(qkv_RAD.numpy(), keys, values, write_R, length_R, np.float32(scale), out_RD.numpy())
    return out_RD


def reference_attend(
    qkv_RAD: torch.Tensor, keys: Array, values: Array, write_R: Array, length_R: Array, scale: float
) -> torch.Tensor:
    kv_heads = keys.shape[1]
    query_RHD, key_RKD, value_RKD = qkv_RAD.tensor_split([-2 * kv_heads, -kv_heads], 1)
    rows = []
    for row, (column, length) in enumerate(zip(write_R, length_R, strict=True)):
        keys[row, :, column], values[row, :, column] = key_RKD[row], value_RKD[row]
        key, value = (torch.from_numpy(part[row : row + 1, :, :length]) for part in (keys, values))
        found = torch.nn.functional.scaled_dot_product_attention(
            query_RHD[row][None, :, None], key, value, scale=scale, enable_gqa=True
        )
        rows.append(found.reshape(-1))
    return torch.stack(rows)


@fastmath
def attend_loop(qkv: Array, keys: Array, values: Array, write: Array, length: Array, scale: Any, out: Array) -> None:
    heads, columns, size = keys.shape[1], keys.shape[2], keys.shape[3]
    group = (qkv.shape[1] - 2 * heads) // heads
    scores, found = np.empty(columns, np.float32), np.empty(size, np.float32)
    for row in range(len(length)):
        for head in range(heads):
            for d in range(size):
                keys[row, head, write[row], d] = qkv[row, heads * group + head, d]
                values[row, head, write[row], d] = qkv[row, heads * (group + 1) + head, d]
            for member in range(head * group, (head + 1) * group):
                top = -np.float32(np.inf)
                for c in range(length[row]):
                    product = _ZERO
                    for d in range(size):
                        product += qkv[row, member, d] * keys[row, head, c, d]
                    scores[c] = product * scale
                    top = scores[c] if scores[c] > top else top
                total = _ZERO
                for c in range(length[row]):
                    scores[c] = exponential(scores[c] - top)
                    total += scores[c]
                _weigh(scores, values[row, head], length[row], found)
                share = _ONE / total
                for d in range(size):
                    out[row, member * size + d] = found[d] * share


@fastmath
def _weigh(weights: Array, rows: Array, count: int, out: Array) -> None:
    """Write the sum of the first `count` rows by their weights; four at once, so that `out` is written less often."""
    for d in range(len(out)):
        out[d] = _ZERO
    for c in range(0, count - 3, 4):
        w, x, y, z = weights[c], weights[c + 1], weights[c + 2], weights[c + 3]
        for d in range(len(out)):
            out[d] += w * rows[c, d] + x * rows[c + 1, d] + y * rows[c + 2, d] + z * rows[c + 3, d]
    for c in range(count - count % 4, count):
        w = weights[c]
        for d in range(len(out)):
            out[d] += w * rows[c, d]
