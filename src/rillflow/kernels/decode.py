"""Attention of a decode step of the embedded engine, on a CPU in fp32 with one thread: one call a layer and no mask.

Each row is read alone, as far as it goes, so no bit of its result depends on the other rows of a batch. torch's
operators also read the masked columns of shorter rows, take a call for each run of rows alike in length, and a dozen
more to norm, rotate and store the new heads.

Sampling takes 1.2 times as long without it at equal lengths, and 1.3 times at mixed ones (`python -m bench.kernels`, a
Xeon): what nodes gain that only sample. A training run of short episodes gains a few per cent.

Axes: R rows, S slots, H heads of queries, K heads of keys, A = H + 2 K heads of queries, keys and values side by side,
C columns of the cache, P positions, D head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from rillflow.kernels.compile import fastmath
from rillflow.kernels.layers import Array, exponential

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Turned(NamedTuple):
    """What new queries and keys go through: a norm, if there are weights for their heads, and a rotation. The sines of
    the first half have the opposite sign."""

    weight_AD: torch.Tensor
    eps: float
    cos_PD: torch.Tensor
    sin_PD: torch.Tensor


def attend(
    qkv_RAD: torch.Tensor, turned: Turned, keys: Array, values: Array, columns: tuple[Array, Array], scale: float
) -> torch.Tensor:
    """Turn new queries and keys in place, write keys and values into the cache [S, K, C, D] of the first R slots, and
    return what the queries find there, [R, H * D].

    `columns` are of each row the one that it writes and how many it then reads, one at least. The new token is at the
    position of the last one.
    """
    rows, heads, size = qkv_RAD.shape
    out_RD = qkv_RAD.new_empty(rows, (heads - 2 * keys.shape[1]) * size)
    weight, cos, sin = (part.numpy() for part in (turned.weight_AD, turned.cos_PD, turned.sin_PD))
    qkv = qkv_RAD.numpy()
    decode_loop(
        qkv, weight, np.float32(turned.eps), cos, sin, keys, values, *columns, np.float32(scale), out_RD.numpy()
    )
    return out_RD


def compile_now() -> None:
    """Compile it, or load its machine code, before the first step."""
    cache, nothing = np.zeros((0, 1, 1, 2), np.float32), np.zeros(0, np.int64)
    turned = Turned(torch.zeros(0, 2), 0.0, torch.zeros(1, 2), torch.zeros(1, 2))
    attend(torch.zeros(0, 3, 2), turned, cache, cache, (nothing, nothing), 1.0)


def reference_attend(
    qkv_RAD: torch.Tensor, turned: Turned, keys: Array, values: Array, columns: tuple[Array, Array], scale: float
) -> torch.Tensor:
    kv_heads = keys.shape[1]
    turning_RBD, value_RKD = qkv_RAD.tensor_split([-kv_heads], 1)
    if len(turned.weight_AD):
        turning_RBD = F.rms_norm(turning_RBD, turning_RBD.shape[-1:], None, turned.eps) * turned.weight_AD
    at_R = torch.from_numpy(columns[1]) - 1
    rolled_RBD = turning_RBD.roll(turning_RBD.shape[-1] // 2, -1)
    turning_RBD = turning_RBD * turned.cos_PD[at_R][:, None] + rolled_RBD * turned.sin_PD[at_R][:, None]
    query_RHD, key_RKD = turning_RBD.tensor_split([-kv_heads], 1)
    rows = []
    for row, (column, length) in enumerate(zip(*columns, strict=True)):
        keys[row, :, column], values[row, :, column] = key_RKD[row], value_RKD[row]
        key, value = (torch.from_numpy(part[row : row + 1, :, :length]) for part in (keys, values))
        query = query_RHD[row][None, :, None]
        found = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
        rows.append(found.reshape(-1))
    return torch.stack(rows)


@fastmath
def decode_loop(
    qkv: Array, weight: Array, eps: Any, cos: Array, sin: Array,
    keys: Array, values: Array, write: Array, length: Array, scale: Any, out: Array,
) -> None:  # fmt: skip
    heads, columns, size = keys.shape[1], keys.shape[2], keys.shape[3]
    group = (qkv.shape[1] - 2 * heads) // heads
    scores, found = np.empty(columns, np.float32), np.empty(size, np.float32)
    for row in range(len(length)):
        _turn(qkv[row], weight, eps, cos[length[row] - 1], sin[length[row] - 1], heads * (group + 1), found)
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
def _turn(heads: Array, weight: Array, eps: Any, cos: Array, sin: Array, count: int, normed: Array) -> None:
    """Norm the first `count` heads, if there are weights for them, and rotate them; `normed` is room for one."""
    size, half = heads.shape[1], heads.shape[1] // 2
    for head in range(count):
        for d in range(size):
            normed[d] = heads[head, d]
        if len(weight):
            squares = _ZERO
            for d in range(size):
                squares += normed[d] * normed[d]
            factor = _ONE / math.sqrt(squares / np.float32(size) + eps)
            for d in range(size):
                normed[d] *= factor * weight[head, d]
        for d in range(half):
            heads[head, d] = normed[d] * cos[d] + normed[half + d] * sin[d]
            heads[head, half + d] = normed[half + d] * cos[half + d] + normed[d] * sin[half + d]


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
