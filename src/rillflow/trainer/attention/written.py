"""Attention written out in matrix products, for scores and devices that no fused kernel of `attention.paths` computes.

Only a block of queries has its scores in memory at once, and nothing of them is kept for the backward pass.

Axes: B sequences, H query heads, of which G share each of K key heads, Q queries, S keys, D head size. Axes of one kind
that are side by side are one axis: KG = H.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rillflow.trainer.attention.kernels import accumulating

_BLOCK = 256  # queries of a sequence whose scores are in memory at once


def forward(
    query_BHQD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [B, H, Q, D] and the log-sum-exps of the scores [B, H, Q]. `mask` [B or 1, 1, Q, S] is added to
    the scores; without one, a query sees the keys up to its own place."""
    out = torch.empty_like(query_BHQD)
    lse = query_BHQD.new_empty(query_BHQD.shape[:3], dtype=accumulating(query_BHQD.dtype))
    for at, seen in _blocks(query_BHQD.shape[2], key_BKSD.shape[2], mask):
        query = _grouped(query_BHQD[:, :, at], key_BKSD)
        scores, _ = _scores(query, key_BKSD[:, :, seen], _part(mask, at), scale, softcap)
        lse[:, :, at] = scores.logsumexp(-1).flatten(1, 2)
        weights = scores.softmax(-1).to(value_BKSD.dtype)
        out[:, :, at] = _times(weights, value_BKSD[:, :, seen]).flatten(1, 2)
    return out, lse


def backward(
    grad_BHQD: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    found: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values; `found` is what `forward` returned for them."""
    (query_BHQD, key_BKSD, value_BKSD), (out_BHQD, lse_BHQ) = heads, found
    of_query = torch.empty_like(query_BHQD)
    of_key, of_value = torch.zeros_like(key_BKSD), torch.zeros_like(value_BKSD)
    for at, seen in _blocks(query_BHQD.shape[2], key_BKSD.shape[2], mask):
        query, pulled, out = (_grouped(part[:, :, at], key_BKSD) for part in (query_BHQD, grad_BHQD, out_BHQD))
        key, value = key_BKSD[:, :, seen], value_BKSD[:, :, seen]
        scores, slope = _scores(query, key, _part(mask, at), scale, softcap)
        weights = (scores - _grouped(lse_BHQ[:, :, at, None], key_BKSD)).exp()
        along = (pulled * out).sum(-1, keepdim=True)
        pull = weights * (_times(pulled, value.transpose(-1, -2)) - along) * scale
        pull = (pull if slope is None else pull * slope).to(query.dtype)
        of_query[:, :, at] = _times(pull, key).flatten(1, 2)
        of_key[:, :, seen] += _summed(pull, query)
        of_value[:, :, seen] += _summed(weights.to(pulled.dtype), pulled)
    return of_query, of_key, of_value


def _blocks(queries: int, keys: int, mask: torch.Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, each with the keys that some of them may see."""
    for first in range(0, queries, _BLOCK):
        end = min(first + _BLOCK, queries)
        yield slice(first, end), slice(0, end if mask is None else keys)


def _part(mask: torch.Tensor | None, at: slice) -> torch.Tensor | None:
    """Return the mask of a block of queries, [B or 1, 1, 1, Q, S]."""
    return None if mask is None else mask[:, :, None, at]


def _scores(
    query_BKGQD: torch.Tensor, key_BKSD: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores and the gradient of the cap, if there is one."""
    product = _times(query_BKGQD, key_BKSD.transpose(-1, -2))
    scores, slope = product.to(accumulating(product.dtype)) * scale, None
    if softcap is not None:
        bent = (scores / softcap).tanh_()
        scores, slope = bent * softcap, 1 - bent * bent
    return (_causal(scores) if mask is None else scores + mask), slope


def _causal(scores: torch.Tensor) -> torch.Tensor:
    """Hide the keys after each query. The last query sees the last key."""
    queries, keys = scores.shape[-2:]
    seen_QS = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
    return scores.masked_fill(~seen_QS, -torch.inf)


def _grouped(heads_BHQD: torch.Tensor, key_BKSD: torch.Tensor) -> torch.Tensor:
    """Return [B, H, Q, D] as [B, K, G, Q, D]."""
    batch, _, *rest = heads_BHQD.shape
    return heads_BHQD.reshape(batch, key_BKSD.shape[1], -1, *rest)


def _times(of_heads_BKGQX: torch.Tensor, matrix_BKXY: torch.Tensor) -> torch.Tensor:
    """Multiply what the heads of a group have with the matrix that they share."""
    product_BKRY = of_heads_BKGQX.flatten(2, 3) @ matrix_BKXY
    return product_BKRY.reshape(*of_heads_BKGQX.shape[:4], -1)


def _summed(weights_BKGQS: torch.Tensor, of_heads_BKGQD: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums [B, K, S, D] over the queries of all heads of a group."""
    return weights_BKGQS.flatten(2, 3).transpose(-1, -2) @ of_heads_BKGQD.flatten(2, 3)
