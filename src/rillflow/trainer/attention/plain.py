"""The kernel for devices without a fused one for the dtype: matrix products, some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rillflow.trainer.attention.spans import Found, Heads, Spans, accumulating

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
