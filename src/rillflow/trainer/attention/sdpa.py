"""The CPU kernel: torch's fused attention, span by span.

Spans are views of the packed tensors, so nothing is copied or padded. Only short spans are computed several at once,
padded at the end to the longest, where no causal query of a real token sees the padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.attention.spans import Found, Heads, Spans, accumulating

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Spans below this length are computed together with spans of similar length, up to `_AT_ONCE` tokens.
_SHORT = 128
_LIKE = 0.75
_AT_ONCE = 4096


class Fused:
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found:
        query, key, value = heads
        found = Found(torch.empty_like(query), query.new_empty(query.shape[:2], dtype=accumulating(query.dtype)))
        for q, k in _calls(spans):
            some = _fused(q.take(query), k.take(key), k.take(value), 0.0, spans.causal, scale=scale)
            for whole, part in zip(found, some, strict=True):
                q.put(whole, part)
        return found

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        grads = Heads(*(torch.empty_like(part) for part in heads))
        for q, k in _calls(spans):
            inputs = (q.take(heads.query), k.take(heads.key), k.take(heads.value))
            outputs = (q.take(whole.out), q.take(whole.lse))
            some = _fused_backward(q.take(grad, blank=True), *inputs, *outputs, 0.0, spans.causal, scale=scale)
            for at, all_of_it, part in zip((q, k, k), grads, some, strict=True):
                at.put(all_of_it, part)
        return grads


class _One:
    """A single span."""

    def __init__(self, start: int, end: int) -> None:
        self._at = slice(start, end)

    def take(self, packed: torch.Tensor, *, blank: bool = False) -> torch.Tensor:
        """Return [tokens, heads, …] as [spans, heads, tokens of a span, …]; with `blank`, padding is 0."""
        return packed[self._at].transpose(0, 1)[None]

    def put(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        packed[self._at] = values[0].transpose(0, 1)


class _Several:
    """Spans of similar length, padded to the longest."""

    def __init__(self, start_B: Ints, length_B: Ints) -> None:
        within_L = np.arange(length_B.max())
        at_BL = start_B[:, None] + np.minimum(within_L, length_B[:, None] - 1)
        real_BL = within_L < length_B[:, None]
        self._shape = at_BL.shape
        self._at = torch.from_numpy(at_BL.reshape(-1))
        self._real = torch.from_numpy(np.flatnonzero(real_BL))
        self._packed = self._at[self._real]

    def take(self, packed: torch.Tensor, *, blank: bool = False) -> torch.Tensor:
        if blank:
            padded = packed.new_zeros(len(self._at), *packed.shape[1:])
            padded[self._real] = packed[self._packed]
        else:
            padded = packed.index_select(0, self._at)
        return padded.view(*self._shape, *packed.shape[1:]).transpose(1, 2)

    def put(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        packed[self._packed] = values.transpose(1, 2).flatten(0, 1)[self._real]


def _calls(spans: Spans) -> Iterator[tuple[_One | _Several, _One | _Several]]:
    """Yield the queries and keys of each call."""
    query_edges, key_edges = spans.query_edges.numpy(), spans.key_edges.numpy()
    length_C = np.diff(query_edges)
    short_C = (length_C < _SHORT) & spans.causal
    for c in np.flatnonzero(~short_C).tolist():
        yield _One(query_edges[c], query_edges[c + 1]), _One(key_edges[c], key_edges[c + 1])
    for several in _alike(np.flatnonzero(short_C), length_C):
        both = _Several(query_edges[several], length_C[several])
        yield both, both


def _alike(index: Ints, length_C: Ints) -> Iterator[Ints]:
    """Yield `index` in parts of similar length."""
    index = index[np.argsort(-length_C[index], kind="stable")]
    while len(index):
        longest = length_C[index[0]]
        fit = int(np.searchsorted(-length_C[index], -_LIKE * longest, side="right"))
        count = min(fit, max(_AT_ONCE // int(longest), 1))
        yield index[:count]
        index = index[count:]
