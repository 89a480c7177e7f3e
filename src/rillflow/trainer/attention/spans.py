"""What a kernel is asked: attention within spans of packed tokens, with the log-sum-exps that let parts be joined."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Heads(NamedTuple):
    """[tokens, heads, head size]; several heads of queries may share one of keys and values. Or gradients of them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Found(NamedTuple):
    """What queries find, `out` [queries, heads, head size], and the log-sum-exp of their scores [queries, heads]."""

    out: torch.Tensor
    lse: torch.Tensor


class Spans(NamedTuple):
    """Spans end to end. Their edges (int32, one more than there are spans) are where the kernel wants them; `…_most`
    is no less than the longest has tokens. In causal spans queries and keys are the same tokens."""

    query_edges: torch.Tensor
    key_edges: torch.Tensor
    query_most: int
    key_most: int
    causal: bool


class Kernel(Protocol):
    def forward(self, heads: Heads, spans: Spans, scale: float) -> Found: ...

    def backward(self, grad: torch.Tensor, heads: Heads, whole: Found, spans: Spans, scale: float) -> Heads:
        """`grad` is of `whole.out`. `whole` is what the queries find in all: these spans may be only a part of it."""


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of `dtype` are kept in."""
    return dtype if dtype.itemsize >= 4 else torch.float32
