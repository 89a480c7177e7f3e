"""Attention of a forest of packed rows, on a CPU in fp32: all trees of a micro-batch in one call.

torch's fused attention has a fixed cost for each call, and its blocks are made for long rows: on spans of some tens of
tokens most of its time is neither products nor exponentials. Here the keys and values of one head that the tokens of a
span see, their ancestors' and their own, are copied side by side, and each query has one softmax over those before it.

The table has a row for each span and each of its ancestors, from the root down, the span itself last: `first query,
beyond the last, first key, beyond the last`.
Invariant: a token's results depend on its own tree alone, to the last bit.

What it gains (`bench.kernels`, two cores of a Neoverse-N1): a sample of `bench.endtoend --case equal` costs
its trainer, which is the slower side there, 9.4 core milliseconds with this kernel and 10.1 without it; with `layers`,
which this kernel feeds, it is 11.3 without both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from rillflow.kernels.compile import compiled, fastmath, inlined
from rillflow.kernels.exponential import exponential

Array = npt.NDArray[Any]
Float = Any  # a float32
_BLOCK = 4  # queries whose gradients are added to keys and values at once
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def paths(parent_S: Array, start_S: Array, length_S: Array) -> torch.Tensor:
    """Return the table of a forest: of each span its parent (-1: none), its first token and how many it has."""
    above: list[list[int]] = []
    for segment, parent in enumerate(parent_S.tolist()):
        above.append([*(above[parent] if parent >= 0 else []), segment])
    query = np.repeat(np.arange(len(above)), [len(path) for path in above])
    key = np.concatenate(above)
    end_S = start_S + length_S
    table = np.stack([start_S[query], end_S[query], start_S[key], end_S[key]], axis=1)
    return torch.from_numpy(table.astype(np.int64))


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return what queries find [tokens, heads, head size]; several heads of queries may share one of keys."""
    found: torch.Tensor = _Attention.apply(query, key, value, table, scale)  # type: ignore[no-untyped-call]
    return found


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the same with one mask over all pairs of tokens."""
    tokens = len(query)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for first, beyond, start, end in table.tolist():
        seen[first:beyond, start:end] = True
    seen &= torch.ones_like(seen).tril()
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out, lse = query.new_empty(query.shape), query.new_empty(query.shape[:2])
        forward_loop(*[*_arrays(query, key, value, table), np.float32(scale), *_arrays(out, lse)])
        ctx.save_for_backward(query, key, value, out, lse, table)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, table = ctx.saved_tensors
        grads = query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
        given = (grad, query, key, value, out, lse, table)
        backward_loop(*[*_arrays(*given), np.float32(ctx.scale), *_arrays(*grads)])
        return (*grads, None, None)


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


# ---------------------------------------------------------------- paths


@compiled
def _last(table: Array, first: int) -> int:
    """Return the last row of the path that begins at `first`: the span itself."""
    while table[first, 0] != table[first, 2]:
        first += 1
    return first


@compiled
def _longest(table: Array) -> int:
    """Return how many keys a path has at most."""
    most, count = 0, 0
    for row in range(len(table)):
        count += table[row, 3] - table[row, 2]
        if table[row, 0] == table[row, 2]:
            most, count = max(most, count), 0
    return most


@compiled
def _shared(table: Array, before: int, first: int) -> int:
    """Return how many rows a path has in common with the path before it: their keys are not copied again."""
    row = 0
    while table[before + row, 2] == table[first + row, 2] and before + row < first:
        if table[first + row, 0] == table[first + row, 2]:
            break
        row += 1
    return row


@inlined
def _copy_rows(part: Array, head: int, table: Array, first: int, last: int, shared: int, rows: Array) -> int:
    """Copy the keys or values of a path, those of the first `shared` rows excepted, as rows; return how many it has."""
    count = 0
    for row in range(first, last + 1):
        begin, end = table[row, 2], table[row, 3]
        if row >= first + shared:
            for token in range(begin, end):
                for d in range(part.shape[2]):
                    rows[count + token - begin, d] = part[token, head, d]
        count += end - begin
    return count


@inlined
def _copy_columns(part: Array, head: int, table: Array, first: int, last: int, shared: int, columns: Array) -> int:
    """Copy them as columns."""
    count = 0
    for row in range(first, last + 1):
        begin, end = table[row, 2], table[row, 3]
        if row >= first + shared:
            for d in range(part.shape[2]):
                for token in range(begin, end):
                    columns[d, count + token - begin] = part[token, head, d]
        count += end - begin
    return count


# ---------------------------------------------------------------- products


@fastmath
def _products(vector: Array, columns: Array, count: int, scale: Float, out: Array) -> None:
    """Write the products of a vector with the first `count` columns; four rows at once, so that `out` is read and
    written less often."""
    size = len(vector)
    for w in range(count):
        out[w] = _ZERO
    for d in range(0, size - 3, 4):
        a, b, c, e = vector[d] * scale, vector[d + 1] * scale, vector[d + 2] * scale, vector[d + 3] * scale
        for w in range(count):
            out[w] += a * columns[d, w] + b * columns[d + 1, w] + c * columns[d + 2, w] + e * columns[d + 3, w]
    for d in range(size - size % 4, size):
        a = vector[d] * scale
        for w in range(count):
            out[w] += a * columns[d, w]


@fastmath
def _weighted(weights: Array, rows: Array, count: int, out: Array) -> None:
    """Write the sum of the first `count` rows by their weights."""
    size = len(out)
    for d in range(size):
        out[d] = _ZERO
    for w in range(0, count - 3, 4):
        a, b, c, e = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
        for d in range(size):
            out[d] += a * rows[w, d] + b * rows[w + 1, d] + c * rows[w + 2, d] + e * rows[w + 3, d]
    for w in range(count - count % 4, count):
        a = weights[w]
        for d in range(size):
            out[d] += a * rows[w, d]


@fastmath
def _spread(weights: Array, rows: Array, count: int, out: Array) -> None:
    """Add to each of `count` rows of `out` the four rows of a block of queries, by its weights."""
    size = out.shape[1]
    for w in range(count):
        a, b, c, e = weights[0, w], weights[1, w], weights[2, w], weights[3, w]
        for d in range(size):
            out[w, d] += a * rows[0, d] + b * rows[1, d] + c * rows[2, d] + e * rows[3, d]


# ---------------------------------------------------------------- a forest


@fastmath
def _softmax(scores: Array, count: int) -> tuple[Float, Float]:
    """Replace scores by their exponentials below the highest score; return that score and the sum."""
    top, total = scores[0], _ZERO
    for w in range(count):
        top = scores[w] if scores[w] > top else top
    for w in range(count):
        scores[w] = exponential(scores[w] - top)
        total += scores[w]
    return top, total


@fastmath
def forward_loop(query: Array, key: Array, value: Array, table: Array, scale: Float, out: Array, lse: Array) -> None:
    size, most, shared_heads = query.shape[2], _longest(table), query.shape[1] // key.shape[1]
    keys, values = np.empty((size, most), np.float32), np.empty((most, size), np.float32)
    scores = np.empty(most, np.float32)
    for k in range(key.shape[1]):
        first, before = 0, 0
        while first < len(table):
            last, shared = _last(table, first), _shared(table, before, first)
            count = _copy_columns(key, k, table, first, last, shared, keys)
            _copy_rows(value, k, table, first, last, shared, values)
            begin, end = table[last, 0], table[last, 1]
            for h in range(k * shared_heads, (k + 1) * shared_heads):
                for t in range(begin, end):
                    seen = count - end + t + 1
                    _products(query[t, h], keys, seen, scale, scores)
                    top, total = _softmax(scores, seen)
                    _weighted(scores, values, seen, out[t, h])
                    lse[t, h] = top + np.float32(math.log(total))
                    share = _ONE / total
                    for d in range(size):
                        out[t, h, d] *= share
            first, before = last + 1, first


@fastmath
def backward_loop(
    grad: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, table: Array, scale: Float,
    of_query: Array, of_key: Array, of_value: Array,
) -> None:  # fmt: skip
    size, most, shared_heads = query.shape[2], _longest(table), query.shape[1] // key.shape[1]
    keys = np.empty((most, size), np.float32)
    of_keys, of_values = np.empty((most, size), np.float32), np.empty((most, size), np.float32)
    key_columns, value_columns = np.empty((size, most), np.float32), np.empty((size, most), np.float32)
    weights, slopes = np.empty((_BLOCK, most), np.float32), np.empty((_BLOCK, most), np.float32)
    queries, grads = np.empty((_BLOCK, size), np.float32), np.empty((_BLOCK, size), np.float32)
    for k in range(key.shape[1]):
        first, before = 0, 0
        while first < len(table):
            last, shared = _last(table, first), _shared(table, before, first)
            count = _copy_rows(key, k, table, first, last, shared, keys)
            _copy_columns(key, k, table, first, last, shared, key_columns)
            _copy_columns(value, k, table, first, last, shared, value_columns)
            of_keys[:count], of_values[:count] = _ZERO, _ZERO
            begin, end = table[last, 0], table[last, 1]
            for h in range(k * shared_heads, (k + 1) * shared_heads):
                for t in range(begin, end, _BLOCK):
                    longest = min(count, count - end + t + _BLOCK)
                    weights[:, :longest], slopes[:, :longest] = _ZERO, _ZERO
                    queries[:], grads[:] = _ZERO, _ZERO
                    for i in range(min(_BLOCK, end - t)):
                        seen = count - end + t + i + 1
                        queries[i], grads[i] = query[t + i, h], grad[t + i, h]
                        _products(queries[i], key_columns, seen, scale, weights[i])
                        _products(grads[i], value_columns, seen, _ONE, slopes[i])
                        _slopes(weights[i], slopes[i], seen, lse[t + i, h], grads[i], out[t + i, h], scale)
                        _weighted(slopes[i], keys, seen, of_query[t + i, h])
                    _spread(weights, grads, longest, of_values)
                    _spread(slopes, queries, longest, of_keys)
            _add(of_keys, table, first, last, k, of_key)
            _add(of_values, table, first, last, k, of_value)
            first, before = last + 1, first


@fastmath
def _slopes(weights: Array, slopes: Array, count: int, lse: Float, grad: Array, out: Array, scale: Float) -> None:
    """Replace scores by their weights in the softmax, and the gradients of the weights by those of the products."""
    mean = _ZERO
    for d in range(len(grad)):
        mean += grad[d] * out[d]
    for w in range(count):
        weights[w] = exponential(weights[w] - lse)
        slopes[w] = weights[w] * (slopes[w] - mean) * scale


@fastmath
def _add(rows: Array, table: Array, first: int, last: int, head: int, out: Array) -> None:
    """Add the gradients of a path's keys or values to those of its tokens."""
    at = 0
    for row in range(first, last + 1):
        for token in range(table[row, 2], table[row, 3]):
            for d in range(out.shape[2]):
                out[token, head, d] += rows[at, d]
            at += 1
