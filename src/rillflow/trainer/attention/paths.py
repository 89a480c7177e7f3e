"""Attention of a forest of packed rows along paths, by torch's fused attention of CPUs where that can compute it.

The *path* of a segment is its ancestors, from the root down, and then itself. A token attends to the tokens of its
segment's path up to itself, in one softmax. The keys and values of a path are copied side by side. A copy of a shared
prefix is cheap: all queries of a segment read it. Segments of similar lengths are computed in one call. They are padded
to the longest, and a mask hides the padding. Segments without ancestors need no mask.

With a window, a query sees as many tokens of its path, up to itself. A segment whose path is longer than the window is
cut into blocks, and of the tokens before a block only those are copied that its first query sees. A mask hides the rest
from the other queries. Paths that are not longer than the window are computed without it.

Axes: B segments of a call, Q queries of a segment, A tokens of its ancestors, P packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rillflow.trainer.attention import written
from rillflow.trainer.attention.kernels import Found, Heads, accumulating

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints
    from rillflow.trainer.packing import Layout

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries of one segment in a call, if it has a mask: a longer segment is cut, so that masks stay small.
_BLOCK = 256
# Lengths in a call are at least this share of the longest, or at most this many tokens shorter.
_LIKE, _NEAR = 0.75, 16
_AT_ONCE = 1 << 13  # tokens of a call, unless one segment has more


class _Block(NamedTuple):
    """The queries [start, end) of a segment, and the places of the tokens on their path before `start` that the first
    of them sees. Blocks that are not `masked` begin their path, and each query sees all queries before it."""

    start: int
    end: int
    above_A: Ints
    masked: bool


def _blocks(layout: Layout, window: int | None) -> Iterator[_Block]:
    above: list[Ints] = []  # of each segment its path, itself included
    for start, length, parent in zip(layout.start_S.tolist(), layout.length_S.tolist(), layout.parent_S, strict=True):
        path_A = above[parent] if parent >= 0 else np.empty(0, np.int64)
        own = np.arange(start, start + length)
        above.append(np.concatenate([path_A, own]))
        beyond = window is not None and len(above[-1]) > window
        size = _BLOCK if parent >= 0 or beyond else length
        for first in range(0, length, size):
            end, before = min(first + size, length), len(path_A) + first
            seen = 0 if window is None else max(before + 1 - window, 0)
            masked = before > 0 or (window is not None and end - first > window)
            yield _Block(start + first, start + end, above[-1][seen:before], masked)


def _alike(blocks: Iterator[_Block]) -> Iterator[list[_Block]]:
    """Yield blocks in parts of similar lengths, of queries and of ancestors. All blocks of a part are masked, or none
    is."""
    some: list[_Block] = []
    above = least = most = 0  # ancestors of the first block, and lengths of the shortest and the longest one
    for block in sorted(blocks, key=lambda block: (not block.masked, -len(block.above_A), block.start - block.end)):
        mine, queries = len(block.above_A), block.end - block.start
        shortest, longest = min(least, queries), max(most, queries)
        alike = bool(some) and block.masked == some[0].masked
        similar = alike and _similar(mine, above) and _similar(shortest, longest)
        if some and not (similar and (len(some) + 1) * (above + longest) <= _AT_ONCE):
            yield some
            some = []
        if not some:
            above, shortest, longest = mine, queries, queries
        some.append(block)
        least, most = shortest, longest
    if some:
        yield some


def _similar(short: int, long: int) -> bool:
    return short >= _LIKE * long or short + _NEAR >= long


def tables(layout: Layout, window: int | None = None) -> list[torch.Tensor]:
    """Return four tables for each call: the places of its queries [B, Q] and keys [B, A + Q], which of the queries are
    not padding, and the mask [B or 1, 1, Q, A + Q], empty if the attention is causal."""
    made: list[torch.Tensor] = []
    masks: dict[tuple[int, int], torch.Tensor] = {}
    for some in _alike(_blocks(layout, window)):
        queries_B = np.array([block.end - block.start for block in some])
        above_B = np.array([len(block.above_A) for block in some])
        within_Q = np.arange(queries_B.max())
        query_BQ = np.array([[block.start] for block in some]) + np.minimum(within_Q, queries_B[:, None] - 1)
        key_BK = np.concatenate([np.zeros((len(some), above_B.max()), np.int64), query_BQ], 1)
        for row, block in enumerate(some):
            key_BK[row, : len(block.above_A)] = block.above_A
        real_N = np.flatnonzero(within_Q < queries_B[:, None])
        made += [torch.from_numpy(part) for part in (query_BQ, key_BK, real_N)]
        made.append(_mask_of(some, above_B, len(within_Q), window, masks))
    return [part.to(layout.tokens_P.device) for part in made]


def _mask_of(
    some: Sequence[_Block], above_B: Ints, queries: int, window: int | None, masks: dict[tuple[int, int], torch.Tensor]
) -> torch.Tensor:
    """Return the mask of some blocks. Calls of blocks of one shape, as a long row has with a window, share one."""
    if not some[0].masked:
        return torch.empty(0)
    if (above_B != above_B[0]).any():
        return _mask(above_B, queries, window)
    shape = (int(above_B[0]), queries)
    if shape not in masks:
        masks[shape] = _mask(above_B[:1], queries, window)
    return masks[shape]


def _mask(above_B: Ints, queries: int, window: int | None) -> torch.Tensor:
    """Return an additive mask: each query sees the tokens above it, and of its own block those up to itself, as far as
    the window reaches."""
    above_B11 = torch.from_numpy(above_B)[:, None, None]
    above_A = torch.arange(int(above_B.max()))
    above_BQA, own_QQ = above_A < above_B11, torch.ones(queries, queries, dtype=torch.bool).tril()
    if window is not None:
        above_BQA = above_BQA & (torch.arange(queries)[:, None] + above_B11 - above_A < window)
        own_QQ = own_QQ.triu(1 - window)
    rows = len(above_B)
    seen_BQK = torch.cat([above_BQA.expand(rows, queries, -1), own_QQ.expand(rows, -1, -1)], 2)
    return torch.zeros(seen_BQK.shape).masked_fill(~seen_BQK, -torch.inf)[:, None]


class _Call:
    """One call of torch's attention, for B blocks of queries."""

    def __init__(self, query_BQ: torch.Tensor, key_BK: torch.Tensor, real_N: torch.Tensor, mask: torch.Tensor) -> None:
        self._query_BQ = query_BQ
        self._key_BK = key_BK
        self._real_N = real_N if len(real_N) < query_BQ.numel() else None
        self.mask = mask if mask.numel() else None

    def heads(self, of: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = of
        return self.queries(query), _rows(key, self._key_BK), _rows(value, self._key_BK)

    def queries(self, packed: torch.Tensor) -> torch.Tensor:
        """Return [P, heads, …] as [B, heads, Q, …]."""
        return _rows(packed, self._query_BQ)

    def gradient(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the queries' results; padding has none."""
        if self._real_N is None:
            return self.queries(packed)
        at_N = self._query_BQ.view(-1)[self._real_N]
        rows = packed.new_zeros(self._query_BQ.numel(), *packed.shape[1:])
        rows[self._real_N] = packed[at_N]
        return rows.view(*self._query_BQ.shape, *packed.shape[1:]).transpose(1, 2)

    def put(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Write what was found for the queries, [B, heads, Q, …]."""
        at_N, rows = self._query_BQ.view(-1), values.transpose(1, 2).flatten(0, 1)
        if self._real_N is not None:
            at_N, rows = at_N[self._real_N], rows[self._real_N]
        packed.index_copy_(0, at_N, rows)

    def add(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Add the gradients of keys or values, [B, heads, A + Q, …]."""
        packed.index_add_(0, self._key_BK.view(-1), values.transpose(1, 2).flatten(0, 1))

    def options(self, dtype: torch.dtype, scale: float) -> dict[str, Any]:
        mask = self.mask if self.mask is None else self.mask.to(dtype)
        return {"dropout_p": 0.0, "is_causal": mask is None, "attn_mask": mask, "scale": scale}


def _rows(packed: torch.Tensor, at_BL: torch.Tensor) -> torch.Tensor:
    rows = packed.index_select(0, at_BL.view(-1))
    return rows.view(*at_BL.shape, *packed.shape[1:]).transpose(1, 2)


def _calls(tables: Sequence[torch.Tensor]) -> Iterator[_Call]:
    for at in range(0, len(tables), 4):
        yield _Call(*tables[at : at + 4])


def forward(heads: Heads, tables: Sequence[torch.Tensor], *, scale: float, softcap: float | None) -> Found:
    query = heads.query
    found = Found(query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=accumulating(query.dtype)))
    for call in _calls(tables):
        some: tuple[torch.Tensor, torch.Tensor]
        if _has_kernel(query, softcap):
            some = _fused(*call.heads(heads), **call.options(query.dtype, scale))
        else:
            some = written.forward(*call.heads(heads), call.mask, scale=scale, softcap=softcap)
        for whole, part in zip(found, some, strict=True):
            call.put(whole, part)
    return found


def backward(
    grad: torch.Tensor,
    heads: Heads,
    whole: Found,
    tables: Sequence[torch.Tensor],
    *,
    scale: float,
    softcap: float | None,
) -> Heads:
    grads = Heads(*(part.new_zeros(part.shape) for part in heads))
    for call in _calls(tables):
        pulled, theirs, found = (
            call.gradient(grad),
            call.heads(heads),
            (call.queries(whole.out), call.queries(whole.lse)),
        )
        if _has_kernel(grad, softcap):
            some = _fused_backward(pulled, *theirs, *found, **call.options(grad.dtype, scale))
        else:
            some = written.backward(pulled, theirs, found, call.mask, scale=scale, softcap=softcap)
        of_query, of_key, of_value = some
        call.put(grads.query, of_query)
        call.add(grads.key, of_key)
        call.add(grads.value, of_value)
    return grads


def _has_kernel(query: torch.Tensor, softcap: float | None) -> bool:
    return query.device.type == "cpu" and softcap is None
