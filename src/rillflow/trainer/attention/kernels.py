"""Attention within spans of packed tokens, with log-sum-exps to join parts.

`Plain` serves devices without a fused kernel for the dtype by matrix products, some queries at a time. `Flash` (NVIDIA
GPUs) is flash attention over spans of any length, in half precision. It calls the operators below
`torch.nn.attention.varlen` directly, because joined passes need their backward with the log-sum-exp of all passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch


class Heads(NamedTuple):
    """Queries, keys and values [tokens, heads, head size], or their gradients. Query heads may share a key head."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Found(NamedTuple):
    """The result `out` [queries, heads, head size] and the log-sum-exp of the scores [queries, heads]."""

    out: torch.Tensor
    lse: torch.Tensor


class Options(NamedTuple):
    """The attention that a layer asks for besides its scale.

    A query sees the `window` latest tokens of its row up to itself; None: all of them. `softcap` bends scores s to
    softcap · tanh(s / softcap). `sinks` [heads] are the scores of one more key that all queries see, whose value is
    zero.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = Options()


class Spans(NamedTuple):
    """Adjacent spans. Their edges (int32, one more than spans) are on the device that the kernel needs; `…_most` is at
    least the length of the longest. In causal spans queries and keys are the same tokens, and a query sees the `window`
    latest of them, or all if that is 0."""

    query_edges: torch.Tensor
    key_edges: torch.Tensor
    query_most: int
    key_most: int
    causal: bool
    window: int = 0


class Kernel(Protocol):
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found: ...

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        """Return gradients; `grad` is that of `whole.out`, the result over all keys. These spans may be a part of
        them."""


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over values of `dtype` are computed."""
    return dtype if dtype.itemsize >= 4 else torch.float32


# ---------------------------------------------------------------- any device: matrix products


# Most scores (queries times keys times heads) in memory at once.
_SCORES = 1 << 27


class Plain:
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found:
        query, key, value = heads
        found = Found(torch.empty_like(query), query.new_empty(query.shape[:2], dtype=accumulating(query.dtype)))
        for q, k, before in _blocks(spans, query.shape[1]):
            scores = _scores(query[q], key[k], before, scale)
            found.lse[q] = _heads_last(scores.logsumexp(-1), query[q])
            found.out[q] = _heads_last(scores.softmax(-1).to(value.dtype) @ value[k].transpose(0, 1), query[q])
        return found

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        query, key, value = heads
        grads = Heads(*(torch.zeros_like(part) for part in heads))
        shared = key.shape[1]
        for q, k, before in _blocks(spans, query.shape[1]):
            lse = _heads_first(whole.lse[q], shared)[..., None]
            weights = (_scores(query[q], key[k], before, scale) - lse).exp()
            pulled = _heads_first(grad[q], shared)
            along = (pulled * _heads_first(whole.out[q], shared)).sum(-1, keepdim=True)
            pull = (weights * (pulled @ value[k].permute(1, 2, 0) - along) * scale).to(query.dtype)
            grads.query[q] = _heads_last(pull @ key[k].transpose(0, 1), query[q])
            grads.key[k] += (pull.transpose(1, 2) @ _heads_first(query[q], shared)).transpose(0, 1)
            grads.value[k] += (weights.to(grad.dtype).transpose(1, 2) @ pulled).transpose(0, 1)
        return grads


def _blocks(spans: Spans, heads: int) -> Iterator[tuple[slice, slice, int | None]]:
    """Yield queries, their keys, and in causal spans the number of keys before the first query."""
    query_edges, key_edges = spans.query_edges.tolist(), spans.key_edges.tolist()
    for c in range(len(query_edges) - 1):
        start, end = query_edges[c], query_edges[c + 1]
        keys = slice(key_edges[c], key_edges[c + 1])
        size = max(_SCORES // (heads * max(keys.stop - keys.start, 1)), 1)
        for first in range(start, end, size):
            yield slice(first, min(first + size, end)), keys, first - start if spans.causal else None


def _scores(query: torch.Tensor, key: torch.Tensor, before: int | None, scale: float) -> torch.Tensor:
    scores = (_heads_first(query, key.shape[1]) @ key.permute(1, 2, 0)).to(accumulating(query.dtype)) * scale
    if before is None:
        return scores
    seen = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(before)
    return scores.masked_fill(~seen.repeat_interleave(scores.shape[1] // len(query), 0), -torch.inf)


def _heads_first(packed: torch.Tensor, shared: int) -> torch.Tensor:
    """Return [tokens, heads, …] as [key heads, tokens times the query heads that share one, …]."""
    split = packed.reshape(len(packed), shared, -1, *packed.shape[2:])
    return split.transpose(0, 1).flatten(1, 2)


def _heads_last(split: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `_heads_first`, for as many tokens as `like` has."""
    back = split.reshape(len(split), len(like), -1, *split.shape[2:])
    return back.transpose(0, 1).flatten(1, 2)


# ---------------------------------------------------------------- NVIDIA GPUs: flash attention and cuDNN


class Flash:
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found:
        edges = (spans.query_edges, spans.key_edges, spans.query_most, spans.key_most)
        out, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            *heads, *edges, 0.0, spans.causal, return_debug_mask=False, scale=scale, **_sides(spans)
        )
        return Found(out, lse_HQ.t().contiguous())

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        edges = (spans.query_edges, spans.key_edges, spans.query_most, spans.key_most)
        found = (whole.out, whole.lse.t().contiguous())
        # Only dropout, which is off, reads the random state.
        state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad, *heads, *found, *edges, 0.0, spans.causal, state, state, scale=scale, **_sides(spans)
        )
        return Heads(*grads)


def _sides(spans: Spans) -> dict[str, int]:
    """Return how many tokens before and after itself a query sees, if its spans have a window."""
    return {"window_size_left": spans.window - 1, "window_size_right": 0} if spans.window else {}


class Cudnn(Flash):
    """cuDNN's attention for a pass of one span without a window, as a pack of one long row has; flash attention for all
    others."""

    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found:
        if not _one(spans):
            return super().forward(heads, spans, scale)
        out_1HQD, lse_1HQ1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(_in_front, heads), None, True, 0.0, spans.causal, False, scale=scale
        )
        return Found(out_1HQD[0].transpose(0, 1), lse_1HQ1[0, :, :, 0].t().contiguous())

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        if not _one(spans):
            return super().backward(grad, heads, whole, spans, scale)
        given = (*map(_in_front, (grad, *heads, whole.out)), whole.lse.t().contiguous()[None, :, :, None])
        state = torch.zeros((), dtype=torch.int64, device=grad.device)
        lengths = (len(heads.query), len(heads.key))
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *given, state, state, None, None, None, *lengths, 0.0, spans.causal, scale=scale
        )
        return Heads(*(part[0].transpose(0, 1) for part in grads))


def _one(spans: Spans) -> bool:
    return len(spans.query_edges) == 2 and not spans.window


def _in_front(packed: torch.Tensor) -> torch.Tensor:
    """Return [tokens, heads, size] as [1, heads, tokens, size], without a copy."""
    return packed.transpose(0, 1)[None]
