"""Norms and gated activations of the Llama family on a CPU, in fp32: one pass over memory each way, by compiled loops.

The library writes them as a dozen operators, each of which reads and writes all activations: in a small model they take
half as long as the matrix products. The results are the same within float rounding.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from rillflow.trainer.exponential import exponential
from rillflow.weights.delta.jit import loosely

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Array = npt.NDArray[Any]
_NORMS = {"LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
_GATED = {"LlamaMLP", "Qwen2MLP", "Qwen3MLP"}
_SILU = {"SiLU", "SiLUActivation"}
_ONE, _NONE = np.float32(1.0), np.float32(0.0)


def fuse(model: PreTrainedModel) -> None:
    """In place, the modules that are known."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in _NORMS:
            module.forward = partial(_norm, module)
        elif kind in _GATED and type(module.act_fn).__name__ in _SILU:
            module.forward = partial(_gated, module)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        return _as_it_was(module, x)
    normed: torch.Tensor = _Norm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        return _as_it_was(module, x)
    made: torch.Tensor = module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-untyped-call]
    return made


def _as_it_was(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A model may be cast after it was fused."""
    made: torch.Tensor = type(module).forward(module, x)
    return made


class _Norm(torch.autograd.Function):
    """The root mean square norm over the last dimension, times a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows_ND = x.contiguous().view(-1, x.shape[-1])
        out_ND, scale_N = torch.empty_like(rows_ND), rows_ND.new_empty(len(rows_ND))
        _normed(*[*_arrays(rows_ND, _lent(weight)), np.float32(eps), *_arrays(out_ND, scale_N)])
        ctx.save_for_backward(rows_ND, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_ND, weight, scale_N = ctx.saved_tensors
        grad_ND = grad.contiguous().view(rows_ND.shape)
        of_rows_ND, of_weight = torch.empty_like(rows_ND), torch.zeros_like(weight)
        _normed_backward(*_arrays(grad_ND, rows_ND, _lent(weight), scale_N, of_rows_ND, of_weight))
        return of_rows_ND.view(grad.shape), of_weight, None


class _Gate(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _gate(*(part.reshape(-1) for part in _arrays(gate, up, out)))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        _gate_backward(*(part.reshape(-1) for part in _arrays(grad.contiguous(), gate, up, of_gate, of_up)))
        return of_gate, of_up


def _lent(weight: torch.Tensor) -> torch.Tensor:
    """A copy: what an array has looked into cannot be resized any more, and a sharded model's weights are."""
    return weight.detach().clone()


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


@loosely
def _normed(x: Array, weight: Array, eps: Any, out: Array, scale: Array) -> None:
    size = x.shape[1]
    for n in range(len(x)):
        total = _NONE
        for d in range(size):
            total += x[n, d] * x[n, d]
        scale[n] = _ONE / math.sqrt(total / np.float32(size) + eps)
        for d in range(size):
            out[n, d] = x[n, d] * scale[n] * weight[d]


@loosely
def _normed_backward(grad: Array, x: Array, weight: Array, scale: Array, of_x: Array, of_weight: Array) -> None:
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


@loosely
def _gate(gate: Array, up: Array, out: Array) -> None:
    for i in range(len(gate)):
        out[i] = gate[i] / (_ONE + exponential(-gate[i])) * up[i]


@loosely
def _gate_backward(grad: Array, gate: Array, up: Array, of_gate: Array, of_up: Array) -> None:
    for i in range(len(gate)):
        share = _ONE / (_ONE + exponential(-gate[i]))
        of_up[i] = grad[i] * gate[i] * share
        of_gate[i] = grad[i] * up[i] * share * (_ONE + gate[i] * (_ONE - share))
