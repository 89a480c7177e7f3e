"""The kernel of the CPU for short spans: a whole forest in one call, by compiled loops over blocks of eight queries.

torch's fused attention has a price for each call, and its blocks are made for long rows: on spans of some tens of
tokens most of its time is neither products nor exponentials. Here the keys and values of one head that a span's tokens
see, its ancestors' and its own, are copied side by side, and a block of queries has one softmax over all of them.

The table has a row for each span and each of its ancestors, from the root down, the span itself last: `first query,
beyond the last, first key, beyond the last`.
Invariant: a token's results depend on its own tree alone, to the last bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from rillflow.trainer.attention.spans import Heads
from rillflow.trainer.attention.tiles import add_outer, dots, slope, soften
from rillflow.weights.delta.jit import compiled, inlined, loosely
from rillflow.weights.delta.vectors import LANES

if TYPE_CHECKING:
    from rillflow.trainer.packing import Layout

Array = npt.NDArray[Any]
Float = Any  # a float32
_LN2 = math.log(2)


def paths(layout: Layout) -> torch.Tensor:
    """The table of a forest."""
    above: list[list[int]] = []
    for segment, parent in enumerate(layout.parent_S.tolist()):
        above.append([*(above[parent] if parent >= 0 else []), segment])
    query = np.repeat(np.arange(len(above)), [len(path) for path in above])
    key = np.concatenate(above)
    start_S, end_S = layout.start_S, layout.start_S + layout.length_S
    table = np.stack([start_S[query], end_S[query], start_S[key], end_S[key]], axis=1)
    return torch.from_numpy(table.astype(np.int64))


def attention(heads: Heads, table: torch.Tensor, scale: float) -> torch.Tensor:
    """What queries find [tokens, heads, head size]."""
    found: torch.Tensor = _Attention.apply(*heads, table, scale)  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out, lse = query.new_empty(query.shape), query.new_empty(query.shape[:2])
        _forward(*[*_arrays(query, key, value, table), np.float32(scale / _LN2), *_arrays(out, lse)])
        ctx.save_for_backward(query, key, value, out, lse, table)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, table = ctx.saved_tensors
        grads = query.new_empty(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
        given = (grad, query, key, value, out, lse, table)
        _backward(*[*_arrays(*given), np.float32(ctx.scale), *_arrays(*grads)])
        return (*grads, None, None)


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


# ---------------------------------------------------------------- a path


@compiled
def _up(number: int) -> int:
    """To whole blocks: what is beyond is 0 there, or is not seen."""
    return (number + LANES - 1) // LANES * LANES


@compiled
def _own(table: Array, first: int) -> int:
    """The last row of the path that begins at this one."""
    while table[first, 0] != table[first, 2]:
        first += 1
    return first


@compiled
def _longest(table: Array) -> int:
    """Keys of a path at most."""
    most, count = 0, 0
    for row in range(len(table)):
        count += table[row, 3] - table[row, 2]
        if table[row, 0] == table[row, 2]:
            most, count = max(most, count), 0
    return _up(most)


@compiled
def _held(table: Array, before: int, first: int) -> int:
    """How many rows of a path are those that the path before begins with too: their keys need not be taken again."""
    row = 0
    while table[before + row, 2] == table[first + row, 2] and before + row < first:
        if table[first + row, 0] == table[first + row, 2]:
            break
        row += 1
    return row


@inlined
def _take(part: Array, head: int, table: Array, first: int, own: int, held: int, turned: bool, out: Array) -> int:
    """The keys or values that a path sees, but those of its first `held` rows, which are there; how many there are.
    Each is a row, or with `turned` a column of its block of eight; the last block is filled up with zeros."""
    size, count = part.shape[2], 0
    for row in range(first, own + 1):
        begin, end = table[row, 2], table[row, 3]
        if row >= first + held:
            for token in range(begin, end):
                to, step = _place(count + token - begin, size, turned)
                for d in range(size):
                    out[to + d * step] = part[token, head, d]
        count += end - begin
    for item in range(count, _up(count)):
        to, step = _place(item, size, turned)
        for d in range(size):
            out[to + d * step] = 0.0
    return count


@inlined
def _place(item: int, size: int, turned: bool) -> tuple[int, int]:
    """Where an item begins, and how far its numbers are apart."""
    if turned:
        return item // LANES * (LANES * size) + item % LANES, LANES
    return item * _up(size), 1


# ---------------------------------------------------------------- a block of queries


@loosely
def _turn(part: Array, first: int, count: int, head: int, times: Float, turned: Array) -> None:
    """Tokens of one head as columns, times a number; zeros where there are no more."""
    for i in range(LANES):
        for d in range(part.shape[2]):
            turned[d * LANES + i] = part[first + i, head, d] * times if i < count else 0.0


@loosely
def _copy(part: Array, first: int, count: int, head: int, times: Float, rows: Array) -> None:
    """The same as rows."""
    size = part.shape[2]
    for i in range(LANES):
        for d in range(size):
            rows[i * _up(size) + d] = part[first + i, head, d] * times if i < count else 0.0


@compiled
def _score(turned: Array, queries: Array, seen: int, size: int, scores: Array) -> None:
    """The products of so many keys with the queries: a row for each key."""
    for w in range(0, seen, LANES):
        dots(turned, w * size, LANES, queries, 0, LANES, size, scores, w * LANES, LANES)


@compiled
def _hide(scores: Array, reach: int, seen: int) -> None:
    """What comes after a query's own token: that of the first one is `reach`, and the others follow."""
    for w in range(reach + 1, seen):
        for i in range(min(w - reach, LANES)):
            scores[w * LANES + i] = -np.inf


@compiled
def _weigh(weights: Array, rows: Array, seen: int, wide: int, out: Array) -> None:
    """The sums of rows by the weights of each query."""
    for d in range(0, wide, LANES):
        dots(weights, 0, LANES, rows, d, wide, seen, out, d, wide)


@compiled
def _spread(weights: Array, rows: Array, seen: int, wide: int, out: Array) -> None:
    """To each of so many keys what all queries add: their rows by its weights."""
    for w in range(0, seen, LANES):
        for d in range(0, wide, LANES):
            add_outer(weights, w * LANES, rows, d, wide, out, w * wide + d, wide)


# ---------------------------------------------------------------- a forest


@compiled
def _floats(count: int) -> Array:
    return np.zeros(count, np.float32)


@loosely
def _forward(query: Array, key: Array, value: Array, table: Array, scale: Float, out: Array, lse: Array) -> None:
    size, most, shared = query.shape[2], _longest(table), query.shape[1] // key.shape[1]
    wide = _up(size)
    turned_keys, values = _floats(most * wide), _floats(most * wide)
    queries, scores, found = _floats(LANES * wide), _floats(LANES * most), _floats(LANES * wide)
    tops, sums = _floats(LANES), _floats(LANES)
    for k in range(key.shape[1]):
        first, before = 0, 0
        while first < len(table):
            own, held = _own(table, first), _held(table, before, first)
            count = _take(key, k, table, first, own, held, True, turned_keys)
            _take(value, k, table, first, own, held, False, values)
            begin, end = table[own, 0], table[own, 1]
            for h in range(k * shared, (k + 1) * shared):
                for t in range(begin, end, LANES):
                    some, reach = min(LANES, end - t), count - end + t
                    seen = _up(reach + some)
                    _turn(query, t, some, h, scale, queries)
                    _score(turned_keys, queries, seen, size, scores)
                    _hide(scores, reach, seen)
                    soften(scores, seen, tops, sums)
                    _weigh(scores, values, seen, wide, found)
                    for i in range(some):
                        lse[t + i, h] = (tops[i] + math.log2(sums[i])) * _LN2
                        for d in range(size):
                            out[t + i, h, d] = found[i * wide + d] / sums[i]
            first, before = own + 1, first


@loosely
def _backward(
    grad: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, table: Array, scale: Float,
    of_query: Array, of_key: Array, of_value: Array,
) -> None:  # fmt: skip
    size, most, shared = query.shape[2], _longest(table), query.shape[1] // key.shape[1]
    wide = _up(size)
    keys, turned_keys, of_keys = _floats(most * wide), _floats(most * wide), _floats(most * wide)
    turned_values, of_values = _floats(most * wide), _floats(most * wide)
    queries, pulls, of_queries = _floats(LANES * wide), _floats(LANES * wide), _floats(LANES * wide)
    turned_queries, turned_pulls = _floats(LANES * wide), _floats(LANES * wide)
    weights, slopes, totals, means = _floats(LANES * most), _floats(LANES * most), _floats(LANES), _floats(LANES)
    for k in range(key.shape[1]):
        first, before = 0, 0
        while first < len(table):
            own, held = _own(table, first), _held(table, before, first)
            count = _take(key, k, table, first, own, held, False, keys)
            _take(key, k, table, first, own, held, True, turned_keys)
            _take(value, k, table, first, own, held, True, turned_values)
            of_keys[: count * wide], of_values[: count * wide] = 0.0, 0.0
            begin, end = table[own, 0], table[own, 1]
            for h in range(k * shared, (k + 1) * shared):
                for t in range(begin, end, LANES):
                    some, reach = min(LANES, end - t), count - end + t
                    seen = _up(reach + some)
                    _turn(query, t, some, h, np.float32(scale / _LN2), turned_queries)
                    _copy(query, t, some, h, scale, queries)
                    _turn(grad, t, some, h, np.float32(1.0), turned_pulls)
                    _copy(grad, t, some, h, np.float32(1.0), pulls)
                    _summaries(pulls, out, lse, t, some, h, totals, means)
                    _score(turned_keys, turned_queries, seen, size, weights)
                    _hide(weights, reach, seen)
                    _score(turned_values, turned_pulls, seen, size, slopes)
                    slope(weights, slopes, seen, totals, means)
                    _weigh(slopes, keys, seen, wide, of_queries)
                    for i in range(some):
                        for d in range(size):
                            of_query[t + i, h, d] = of_queries[i * wide + d] * scale
                    _spread(weights, pulls, seen, wide, of_values)
                    _spread(slopes, queries, seen, wide, of_keys)
            _add(of_keys, table, first, own, k, of_key)
            _add(of_values, table, first, own, k, of_value)
            first, before = own + 1, first


@loosely
def _summaries(
    pulls: Array, out: Array, lse: Array, first: int, count: int, head: int, totals: Array, means: Array
) -> None:  # fmt: skip
    """Of each query the log-sum-exp, of base 2, and what pulls at its weights on average; zeros where there is none."""
    size = out.shape[2]
    for i in range(LANES):
        totals[i], means[i] = 0.0, 0.0
    for i in range(count):
        along = np.float32(0.0)
        for d in range(size):
            along += pulls[i * _up(size) + d] * out[first + i, head, d]
        totals[i], means[i] = lse[first + i, head] / _LN2, along


@loosely
def _add(rows: Array, table: Array, first: int, own: int, head: int, out: Array) -> None:
    """What the tokens of a path have got."""
    size, at = out.shape[2], 0
    for row in range(first, own + 1):
        for token in range(table[row, 2], table[row, 3]):
            for d in range(size):
                out[token, head, d] += rows[at * _up(size) + d]
            at += 1
