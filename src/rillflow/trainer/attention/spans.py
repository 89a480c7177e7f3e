"""The interface of attention kernels: attention within spans of packed tokens, with log-sum-exps to join parts."""

from __future__ import annotations

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


class Spans(NamedTuple):
    """Adjacent spans. Their edges (int32, one more than spans) are on the device that the kernel needs; `…_most` is at
    least the length of the longest. In causal spans queries and keys are the same tokens."""

    query_edges: torch.Tensor
    key_edges: torch.Tensor
    query_most: int
    key_most: int
    causal: bool


class Kernel(Protocol):
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found: ...

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        """Return gradients; `grad` is that of `whole.out`, the result over all keys. These spans may be a part of
        them."""


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over values of `dtype` are computed."""
    return dtype if dtype.itemsize >= 4 else torch.float32
