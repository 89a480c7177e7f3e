"""Attention of a forest as one operator: its passes by a kernel, joined by their log-sum-exps.

Nothing of a shared prefix is ever copied for those that share it, and only queries, keys, values, the result and its
log-sum-exps are kept for the backward pass, as flash attention does for plain rows. To torch.compile the operator is a
black box: no graph breaks at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rillflow.trainer.attention.passes import passes
from rillflow.trainer.attention.plain import Plain
from rillflow.trainer.attention.sdpa import Fused
from rillflow.trainer.attention.spans import Found, Heads, Kernel, Spans, accumulating
from rillflow.trainer.attention.varlen import Flash
from rillflow.trainer.layout import Layout

KERNELS: dict[str, Kernel] = {"fused": Fused(), "plain": Plain(), "flash": Flash()}
_TABLES = 4  # of each pass: queries, keys, edges of spans of queries, edges of spans of keys
_ROUND = 128


class Joined(NamedTuple):
    """A forest's passes as the operator takes them."""

    tables: list[torch.Tensor]
    most: list[int]
    kernel: str

    def __call__(self, heads: Heads, scale: float) -> torch.Tensor:
        out: torch.Tensor = torch.ops.rillflow.forest_attention(
            *heads, self.tables, self.most, way=self.kernel, scale=scale
        )[0]
        return out


def joined(layout: Layout, kernel: str) -> Joined:
    """Kernels that loop over spans on the host want their edges there."""
    device = layout.tokens_P.device
    edges_on = device if kernel == "flash" else torch.device("cpu")
    tables: list[torch.Tensor] = []
    most: list[int] = []
    for one in passes(layout):
        tables += [_index(one.query_Q, device), _index(one.key_K, device)]
        tables += [_edges(one.query_C).to(edges_on), _edges(one.key_C).to(edges_on)]
        most += [_rounded(one.query_C), _rounded(one.key_C)]
    return Joined(tables, most, kernel)


def _index(index: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.empty(0, dtype=np.int64) if index is None else index).to(device)


def _edges(count_C: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(count_C)]).astype(np.int32))


def _rounded(count_C: Any) -> int:
    """The most of a span, rounded up: what is compiled for it serves more batches."""
    return -(-int(count_C.max()) // _ROUND) * _ROUND


class _Step(NamedTuple):
    query_Q: torch.Tensor
    key_K: torch.Tensor
    spans: Spans


def _steps(tables: Sequence[torch.Tensor], most: Sequence[int]) -> Iterator[_Step]:
    """The first is causal and of all tokens."""
    for number in range(len(tables) // _TABLES):
        query_Q, key_K, query_edges, key_edges = tables[number * _TABLES : (number + 1) * _TABLES]
        spans = Spans(query_edges, key_edges, most[2 * number], most[2 * number + 1], causal=number == 0)
        yield _Step(query_Q, key_K, spans)


@torch.library.custom_op("rillflow::forest_attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: list[torch.Tensor],
    most: list[int],
    *,
    way: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    run, heads = KERNELS[way], Heads(query, key, value)
    own, *above = _steps(tables, most)
    whole = run.forward(heads, own.spans, scale)
    for step in above:
        _join(whole, step.query_Q, run.forward(_picked(heads, step), step.spans, scale))
    return whole.out.contiguous(), whole.lse.contiguous()  # what is compiled relies on it


def _picked(heads: Heads, step: _Step) -> Heads:
    picked = (part.index_select(0, step.key_K) for part in (heads.key, heads.value))
    return Heads(heads.query.index_select(0, step.query_Q), *picked)


def _join(whole: Found, query_Q: torch.Tensor, some: Found) -> None:
    """Add what some queries have found among further keys."""
    before = whole.lse.index_select(0, query_Q)
    after = torch.logaddexp(before, some.lse)
    exact = accumulating(whole.out.dtype)
    out = whole.out.index_select(0, query_Q).to(exact) * (before - after).exp()[..., None]
    out += some.out.to(exact) * (some.lse - after).exp()[..., None]
    whole.out.index_copy_(0, query_Q, out.to(whole.out.dtype))
    whole.lse.index_copy_(0, query_Q, after)


@_attention.register_fake
def _(query: torch.Tensor, *others: Any, **options: Any) -> Any:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=accumulating(query.dtype))


@torch.library.custom_op("rillflow::forest_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    heads: list[torch.Tensor],
    found: list[torch.Tensor],
    tables: list[torch.Tensor],
    most: list[int],
    *,
    way: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run, inputs, whole = KERNELS[way], Heads(*heads), Found(*found)
    own, *above = _steps(tables, most)
    grads = run.backward(grad, inputs, whole, own.spans, scale)
    for step in above:
        pulled, *theirs = (part.index_select(0, step.query_Q) for part in (grad, *whole))
        some = run.backward(pulled, _picked(inputs, step), Found(*theirs), step.spans, scale)
        for all_of_it, index, part in zip(grads, (step.query_Q, step.key_K, step.key_K), some, strict=True):
            all_of_it.index_copy_(0, index, all_of_it.index_select(0, index) + part)  # no index comes twice
    of_query, of_key, of_value = (part.contiguous() for part in grads)
    return of_query, of_key, of_value


@_attention_backward.register_fake
def _(grad: torch.Tensor, heads: Sequence[torch.Tensor], *others: Any, **options: Any) -> Any:
    query, key, value = (part.new_empty(part.shape) for part in heads)
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    query, key, value, tables, most = inputs
    ctx.save_for_backward(query, key, value, *output, *tables)
    ctx.most, ctx.options = most, keyword_only_inputs
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, *tables = ctx.saved_tensors
    grads = torch.ops.rillflow.forest_attention_backward(
        grad.contiguous(), [query, key, value], [out, lse], tables, ctx.most, **ctx.options
    )
    return (*grads, [None] * len(tables), None)


_attention.register_autograd(_differentiate, setup_context=_keep)
