"""The kernel of the CPU for short spans: a whole forest in one call, by compiled loops over blocks of queries.

torch's fused attention has a price for each call, and its blocks are made for long rows: on spans of some tens of
tokens most of its time is neither products nor exponentials. Here queries, keys and values of one span and head are
copied side by side, and what a block of queries finds is joined with what it has found before.

A pair is `first query, beyond the last, first key, beyond the last, depth`: at depth 0 queries and keys are the same
tokens and attention is causal, and it comes before the pairs of greater depth that the same queries have.
Invariant: a token's results depend on its own tree alone, to the last bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rillflow.trainer.attention.passes import passes
from rillflow.trainer.attention.spans import Found, Heads
from rillflow.trainer.exponential import exponential
from rillflow.weights.delta.jit import compiled, loosely

if TYPE_CHECKING:
    from rillflow.trainer.layout import Layout

Array = npt.NDArray[Any]
Float = Any  # a float32
_BLOCK = 8  # queries at once; the products below are written for it
_ONE, _NONE = np.float32(1.0), np.float32(0.0)


def pairs(layout: Layout) -> torch.Tensor:
    """All pairs of a forest."""
    found = [
        np.stack([one.query_at_C, one.query_at_C + one.query_C, one.key_at_C, one.key_at_C + one.key_C,
                  np.full_like(one.key_C, depth)], axis=1)
        for depth, one in enumerate(passes(layout))
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate(found).astype(np.int64))


def forward(heads: Heads, pairs: torch.Tensor, scale: float) -> Found:
    query = heads.query
    found = Found(query.new_empty(query.shape), query.new_empty(query.shape[:2]))
    _forward(*[*_arrays(*heads, pairs), np.float32(scale), *_arrays(*found)])
    return found


def backward(grad: torch.Tensor, heads: Heads, whole: Found, pairs: torch.Tensor, scale: float) -> Heads:
    grads = Heads(*(part.new_zeros(part.shape) for part in heads))
    _backward(*[*_arrays(grad, *heads, *whole, pairs), np.float32(scale), *_arrays(*grads)])
    return grads


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


# ---------------------------------------------------------------- small matrices


@compiled
def _up(number: int) -> int:
    """To whole blocks: what is beyond is 0 there."""
    return (number + _BLOCK - 1) // _BLOCK * _BLOCK


@loosely
def _take(part: Array, first: int, count: int, head: int, rows: int, times: Float, out: Array) -> None:
    """Tokens of one head, times a number; zeros up to so many rows."""
    for r in range(count):
        for d in range(part.shape[2]):
            out[r, d] = part[first + r, head, d] * times
    for r in range(count, rows):
        for d in range(part.shape[2]):
            out[r, d] = 0.0


@compiled
def _turn(rows: Array, count: int, size: int, out: Array) -> None:
    """Rows as columns."""
    for r in range(count):
        for d in range(size):
            out[d, r] = rows[r, d]


@loosely
def _dots(left: Array, right: Array, rows: int, columns: int, size: int, out: Array) -> None:
    """out = left @ right.T, four by four of them at a time: so all sums stay in registers."""
    for r in range(0, rows, 4):
        for j in range(0, columns, 4):
            a0, a1, a2, a3 = _NONE, _NONE, _NONE, _NONE
            b0, b1, b2, b3 = _NONE, _NONE, _NONE, _NONE
            c0, c1, c2, c3 = _NONE, _NONE, _NONE, _NONE
            d0, d1, d2, d3 = _NONE, _NONE, _NONE, _NONE
            for x in range(size):
                a, b, c, d = left[r, x], left[r + 1, x], left[r + 2, x], left[r + 3, x]
                e, f, g, h = right[j, x], right[j + 1, x], right[j + 2, x], right[j + 3, x]
                a0, a1, a2, a3 = a0 + a * e, a1 + a * f, a2 + a * g, a3 + a * h
                b0, b1, b2, b3 = b0 + b * e, b1 + b * f, b2 + b * g, b3 + b * h
                c0, c1, c2, c3 = c0 + c * e, c1 + c * f, c2 + c * g, c3 + c * h
                d0, d1, d2, d3 = d0 + d * e, d1 + d * f, d2 + d * g, d3 + d * h
            out[r, j], out[r, j + 1], out[r, j + 2], out[r, j + 3] = a0, a1, a2, a3
            out[r + 1, j], out[r + 1, j + 1], out[r + 1, j + 2], out[r + 1, j + 3] = b0, b1, b2, b3
            out[r + 2, j], out[r + 2, j + 1], out[r + 2, j + 2], out[r + 2, j + 3] = c0, c1, c2, c3
            out[r + 3, j], out[r + 3, j + 1], out[r + 3, j + 2], out[r + 3, j + 3] = d0, d1, d2, d3


@loosely
def _add_outer(left: Array, right: Array, rows: int, size: int, out: Array) -> None:
    """out += left.T @ right, which both have the rows of a block."""
    for r in range(rows):
        a, b, c, d = left[0, r], left[1, r], left[2, r], left[3, r]
        e, f, g, h = left[4, r], left[5, r], left[6, r], left[7, r]
        for i in range(size):
            out[r, i] += (a * right[0, i] + b * right[1, i] + c * right[2, i] + d * right[3, i]) + (
                e * right[4, i] + f * right[5, i] + g * right[6, i] + h * right[7, i]
            )


@loosely
def _exponentials(row: Array, count: int, base: Float) -> None:
    """e to the power of each less `base`."""
    for i in range(count):
        row[i] = exponential(row[i] - base)


@loosely
def _greatest(row: Array, count: int) -> Float:
    """Four at a time: none waits for the one before it."""
    a, b, c, d = row[0], row[0], row[0], row[0]
    for j in range(0, count - 3, 4):
        a = row[j] if row[j] > a else a
        b = row[j + 1] if row[j + 1] > b else b
        c = row[j + 2] if row[j + 2] > c else c
        d = row[j + 3] if row[j + 3] > d else d
    for j in range(count // 4 * 4, count):
        a = row[j] if row[j] > a else a
    a, c = b if b > a else a, d if d > c else c
    return c if c > a else a


@loosely
def _softmax(row: Array, count: int, width: int) -> tuple[Float, Float]:
    """Weights that are not divided by their sum yet, zeros behind them; the greatest score, and the sum."""
    most = _greatest(row, count)
    _exponentials(row, count, most)
    total = _NONE
    for j in range(count):
        total += row[j]
    for j in range(count, width):
        row[j] = 0.0
    return most, total


# ---------------------------------------------------------------- a forest


@compiled
def _longest(pairs: Array) -> int:
    """Keys of a pair at most."""
    found = 0
    for p in range(len(pairs)):
        found = max(found, pairs[p, 3] - pairs[p, 2])
    return _up(found)


@loosely
def _forward(query: Array, key: Array, value: Array, pairs: Array, scale: Float, out: Array, lse: Array) -> None:
    size, most, shared = query.shape[2], _longest(pairs), query.shape[1] // key.shape[1]
    keys, values = np.empty((most, size), np.float32), np.empty((most, size), np.float32)
    turned, rows = np.empty((size, most), np.float32), np.empty((_BLOCK, size), np.float32)
    scores, found = np.empty((_BLOCK, most), np.float32), np.empty((_BLOCK, size), np.float32)
    tops, totals = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    for p in range(len(pairs)):
        begin, end, first, beyond, depth = pairs[p]
        count = beyond - first
        width = _up(count)
        for k in range(key.shape[1]):
            _take(key, first, count, k, width, _ONE, keys)
            _take(value, first, count, k, width, _ONE, values)
            _turn(values, width, size, turned)
            for h in range(k * shared, (k + 1) * shared):
                for t in range(begin, end, _BLOCK):
                    some = min(_BLOCK, end - t)
                    seen = min(_up(t - begin + some), width) if depth == 0 else width
                    _take(query, t, some, h, _BLOCK, scale, rows)
                    _dots(rows, keys, _BLOCK, seen, size, scores)
                    for i in range(_BLOCK):
                        tops[i], totals[i] = _softmax(
                            scores[i], min(t + i - begin + 1, count) if depth == 0 else count, seen
                        )
                    _dots(scores, turned, _BLOCK, size, seen, found)
                    for i in range(some):
                        _join(found[i], tops[i], totals[i], depth, t + i, h, out, lse)


@loosely
def _join(found: Array, top: Float, total: Float, depth: int, t: int, h: int, out: Array, lse: Array) -> None:
    """What a query has found among some keys, with what it found before."""
    here = top + np.float32(math.log(total))
    if depth == 0:
        lse[t, h] = here
        for d in range(len(found)):
            out[t, h, d] = found[d] / total
    else:
        share = _ONE / (_ONE + np.float32(math.exp(lse[t, h] - here)))
        lse[t, h] = max(lse[t, h], here) + np.float32(math.log1p(math.exp(-abs(lse[t, h] - here))))
        for d in range(len(found)):
            out[t, h, d] = out[t, h, d] * (_ONE - share) + found[d] * (share / total)


@loosely
def _backward(
    grad: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, pairs: Array, scale: Float,
    of_query: Array, of_key: Array, of_value: Array,
) -> None:  # fmt: skip
    size, most, shared = query.shape[2], _longest(pairs), query.shape[1] // key.shape[1]
    keys, values = np.empty((most, size), np.float32), np.empty((most, size), np.float32)
    of_keys, of_values = np.empty((most, size), np.float32), np.empty((most, size), np.float32)
    turned, rows = np.empty((size, most), np.float32), np.empty((_BLOCK, size), np.float32)
    pulls, outs = np.empty((_BLOCK, size), np.float32), np.empty((_BLOCK, size), np.float32)
    of_rows = np.empty((_BLOCK, size), np.float32)
    weights, slopes = np.empty((_BLOCK, most), np.float32), np.empty((_BLOCK, most), np.float32)
    for p in range(len(pairs)):
        begin, end, first, beyond, depth = pairs[p]
        count = beyond - first
        width = _up(count)
        for k in range(key.shape[1]):
            _take(key, first, count, k, width, _ONE, keys)
            _take(value, first, count, k, width, _ONE, values)
            _turn(keys, width, size, turned)
            of_keys[:width], of_values[:width] = 0.0, 0.0
            for h in range(k * shared, (k + 1) * shared):
                for t in range(begin, end, _BLOCK):
                    some = min(_BLOCK, end - t)
                    seen = min(_up(t - begin + some), width) if depth == 0 else width
                    _take(query, t, some, h, _BLOCK, scale, rows)
                    _take(grad, t, some, h, _BLOCK, _ONE, pulls)
                    _take(out, t, some, h, _BLOCK, _ONE, outs)
                    _dots(rows, keys, _BLOCK, seen, size, weights)
                    _dots(pulls, values, _BLOCK, seen, size, slopes)
                    for i in range(_BLOCK):
                        reach = 0 if i >= some else t + i - begin + 1 if depth == 0 else count
                        _slopes(weights[i], slopes[i], pulls[i], outs[i], lse[min(t + i, end - 1), h], reach, seen)
                    _dots(slopes, turned, _BLOCK, size, seen, of_rows)
                    for i in range(some):
                        for d in range(size):
                            of_query[t + i, h, d] += of_rows[i, d] * scale
                    _add_outer(weights, pulls, seen, size, of_values)
                    _add_outer(slopes, rows, seen, size, of_keys)
            for j in range(count):
                for d in range(size):
                    of_key[first + j, k, d] += of_keys[j, d]
                    of_value[first + j, k, d] += of_values[j, d]


@loosely
def _slopes(
    weights: Array, slopes: Array, pull: Array, out: Array, lse: Float, count: int, width: int
) -> None:  # fmt: skip
    """From scores and products of gradient and values to weights and the gradients of scores; zeros behind them."""
    along = _NONE
    for d in range(len(pull)):
        along += pull[d] * out[d]
    _exponentials(weights, count, lse)
    for j in range(count):
        slopes[j] = weights[j] * (slopes[j] - along)
    for j in range(count, width):
        weights[j], slopes[j] = 0.0, 0.0
