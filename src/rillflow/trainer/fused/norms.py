"""The root mean square norm over the last dimension, times a weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from rillflow.trainer.fused.arrays import Array, arrays, lent
from rillflow.weights.delta.jit import loosely

_ONE, _NONE = np.float32(1.0), np.float32(0.0)


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return normed(x, module.weight, module.variance_epsilon)
    made: torch.Tensor = type(module).forward(module, x)  # a model may be cast after it was fused
    return made


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    made: torch.Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return made


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows_ND = x.contiguous().view(-1, x.shape[-1])
        out_ND, scale_N = torch.empty_like(rows_ND), rows_ND.new_empty(len(rows_ND))
        norm_rows(*[*arrays(rows_ND, lent(weight)), np.float32(eps), *arrays(out_ND, scale_N)])
        ctx.save_for_backward(rows_ND, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_ND, weight, scale_N = ctx.saved_tensors
        grad_ND = grad.contiguous().view(rows_ND.shape)
        of_rows_ND, of_weight = torch.empty_like(rows_ND), torch.zeros_like(weight)
        norm_rows_backward(*arrays(grad_ND, rows_ND, lent(weight), scale_N, of_rows_ND, of_weight))
        return of_rows_ND.view(grad.shape), of_weight, None


@loosely
def norm_rows(x: Array, weight: Array, eps: Any, out: Array, scale: Array) -> None:
    size = x.shape[1]
    for n in range(len(x)):
        total = _NONE
        for d in range(size):
            total += x[n, d] * x[n, d]
        scale[n] = _ONE / math.sqrt(total / np.float32(size) + eps)
        for d in range(size):
            out[n, d] = x[n, d] * scale[n] * weight[d]


@loosely
def norm_rows_backward(grad: Array, x: Array, weight: Array, scale: Array, of_x: Array, of_weight: Array) -> None:
    size = x.shape[1]
    for n in range(len(x)):
        along, r = _NONE, scale[n]
        for d in range(size):
            along += grad[n, d] * weight[d] * x[n, d]
        pull = along * r * r * r / np.float32(size)
        for d in range(size):
            of_x[n, d] = grad[n, d] * weight[d] * r - x[n, d] * pull
        for d in range(size):
            of_weight[d] += grad[n, d] * x[n, d] * r
