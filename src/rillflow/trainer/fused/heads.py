"""Attention of packed rows: from hidden states to heads, and back.

Queries and keys stay where the projections put them, token by token: they are normed and rotated there, in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from rillflow.trainer.attention.interface import check
from rillflow.trainer.attention.joined import LOOPS, Joined
from rillflow.trainer.attention.spans import Heads
from rillflow.trainer.fused.arrays import Array, arrays, lent
from rillflow.trainer.fused.norms import norm_rows, norm_rows_backward
from rillflow.weights.delta.jit import loosely


def attended(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    packed: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As the module has it; what is not of packed rows is left to it. The arguments have the library's names."""
    cos_1PD, sin_1PD = position_embeddings
    if not _ours(module, hidden_states, cos_1PD, packed, options):
        theirs: tuple[torch.Tensor, None] = type(module).forward(
            module, hidden_states=hidden_states, position_embeddings=position_embeddings,
            attention_mask=attention_mask, packed=packed, **options,
        )  # fmt: skip
        return theirs
    check(module, module.attention_dropout if module.training else 0.0, vars(module))
    shape = (hidden_states.shape[1], -1, module.head_dim)
    query, key, value = (part(hidden_states).view(shape) for part in (module.q_proj, module.k_proj, module.v_proj))
    query = turned(query, _norm_of(module, "q_norm"), cos_1PD[0], sin_1PD[0])
    key = turned(key, _norm_of(module, "k_norm"), cos_1PD[0], sin_1PD[0])
    found = packed(Heads(query, key, value), module.scaling)
    return module.o_proj(found.view(1, len(found), -1)), None


def _ours(module: Any, hidden: torch.Tensor, cos: torch.Tensor, packed: Any, options: dict[str, Any]) -> bool:
    looped = isinstance(packed, Joined) and packed.kernel == LOOPS and options.get("past_key_values") is None
    plain = hidden.dtype == cos.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return looped and plain and len(hidden) == 1 and cos.shape[-1] == module.head_dim


def turned(
    heads: torch.Tensor, norm: tuple[torch.Tensor | None, float], cos_PD: torch.Tensor, sin_PD: torch.Tensor
) -> torch.Tensor:
    """Heads [tokens, heads, head size], normed by a weight and an epsilon if there are any, then rotated."""
    found: torch.Tensor = _Turned.apply(heads, *norm, cos_PD, sin_PD)  # type: ignore[no-untyped-call]
    return found


def _norm_of(module: Any, name: str) -> tuple[torch.Tensor | None, float]:
    norm = getattr(module, name, None)
    return (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
        if weight is None:
            out, saved = heads.clone(), []
        else:
            out, scale = torch.empty_like(heads), heads.new_empty(heads.shape[:2])
            rows, to = (part.view(-1, heads.shape[2]) for part in (heads, out))
            norm_rows(*[*arrays(rows, lent(weight)), np.float32(eps), *arrays(to, scale.view(-1))])
            saved = [heads, weight, scale]
        _turn(*arrays(out, cos, sin))
        ctx.save_for_backward(cos, sin, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        cos, sin, *saved = ctx.saved_tensors
        pull = grad.clone(memory_format=torch.contiguous_format)
        _turn_back(*arrays(pull, cos, sin))
        if not saved:
            return pull, None, None, None, None
        heads, weight, scale = saved
        of_heads, of_weight = torch.empty_like(heads), torch.zeros_like(weight)
        pull, rows, to = (part.view(-1, heads.shape[2]) for part in (pull, heads, of_heads))
        norm_rows_backward(*arrays(pull, rows, lent(weight), scale.view(-1), to, of_weight))
        return of_heads, of_weight, None, None, None


@loosely
def _turn(heads: Array, cos: Array, sin: Array) -> None:
    """In place: number d of a head and the one half a head further are a point of a plane, turned by an angle."""
    half = heads.shape[2] // 2
    for t in range(len(heads)):
        for h in range(heads.shape[1]):
            for d in range(half):
                x, y = heads[t, h, d], heads[t, h, half + d]
                heads[t, h, d] = x * cos[t, d] - y * sin[t, d]
                heads[t, h, half + d] = y * cos[t, half + d] + x * sin[t, half + d]


@loosely
def _turn_back(heads: Array, cos: Array, sin: Array) -> None:
    """What the points pull at when so much pulls at the turned ones."""
    half = heads.shape[2] // 2
    for t in range(len(heads)):
        for h in range(heads.shape[1]):
            for d in range(half):
                x, y = heads[t, h, d], heads[t, h, half + d]
                heads[t, h, d] = x * cos[t, d] + y * sin[t, half + d]
                heads[t, h, half + d] = y * cos[t, half + d] - x * sin[t, d]
