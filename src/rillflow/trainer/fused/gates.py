"""Gated activations: silu(gate) * up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from rillflow.trainer.exponential import exponential
from rillflow.trainer.fused.arrays import Array, arrays
from rillflow.weights.delta.jit import loosely

_ONE = np.float32(1.0)


def gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor
    if x.dtype == torch.float32:
        made = module.down_proj(gate(module.gate_proj(x), module.up_proj(x)))
    else:
        made = type(module).forward(module, x)  # a model may be cast after it was fused
    return made


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Gate.apply(gates, ups)  # type: ignore[no-untyped-call]
    return made


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _gate_all(*(part.reshape(-1) for part in arrays(gate, up, out)))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        _gate_all_backward(*(part.reshape(-1) for part in arrays(grad.contiguous(), gate, up, of_gate, of_up)))
        return of_gate, of_up


@loosely
def _gate_all(gate: Array, up: Array, out: Array) -> None:
    for i in range(len(gate)):
        out[i] = gate[i] / (_ONE + exponential(-gate[i])) * up[i]


@loosely
def _gate_all_backward(grad: Array, gate: Array, up: Array, of_gate: Array, of_up: Array) -> None:
    for i in range(len(gate)):
        share = _ONE / (_ONE + exponential(-gate[i]))
        of_up[i] = grad[i] * gate[i] * share
        of_gate[i] = grad[i] * up[i] * share * (_ONE + gate[i] * (_ONE - share))
