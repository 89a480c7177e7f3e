"""Norms, gates and rotary embeddings of the Llama family, on a CPU in fp32: one pass over memory in each direction.

torch's operators read and write all activations a dozen times for them. Each function is an autograd function and has
the same results and gradients as its reference, within float rounding.

What it gains (`bench.kernels`, two cores of a Neoverse-N1): a sample of `bench.endtoend --case equal` costs
its trainer, which is the slower side there, 9.7 core milliseconds with this kernel and 11.0 without it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from rillflow.kernels.compile import fastmath, inlined

Array = npt.NDArray[Any]
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` over the root of its mean square, over the last dimension, times a weight."""
    made: torch.Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return made


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * ups."""
    made: torch.Tensor = _Gate.apply(gates, ups)  # type: ignore[no-untyped-call]
    return made


def rotate(
    heads: torch.Tensor, norm: tuple[torch.Tensor | None, float], cos_PD: torch.Tensor, sin_PD: torch.Tensor
) -> torch.Tensor:
    """Return heads [tokens, heads, head size] with rotary embedding, normed before it if `norm` has a weight."""
    found: torch.Tensor = _Rotary.apply(heads, *norm, cos_PD, sin_PD)  # type: ignore[no-untyped-call]
    return found


# ------------------------------------------------------------ references


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def reference_gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gates) * ups


def reference_rotate(
    heads: torch.Tensor, norm: tuple[torch.Tensor | None, float], cos_PD: torch.Tensor, sin_PD: torch.Tensor
) -> torch.Tensor:
    weight, eps = norm
    if weight is not None:
        heads = reference_rms_norm(heads, weight, eps)
    first, second = heads.chunk(2, -1)
    return heads * cos_PD[:, None] + torch.cat([-second, first], -1) * sin_PD[:, None]


# ------------------------------------------------------------ autograd


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


def _lent(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy: memory that a numpy array refers to cannot be resized, as a sharded model's weights are."""
    return weight.detach().clone()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows_ND = x.contiguous().view(-1, x.shape[-1])
        out_ND, scale_N = torch.empty_like(rows_ND), rows_ND.new_empty(len(rows_ND))
        norm_loop(*[*_arrays(rows_ND, _lent(weight)), np.float32(eps), *_arrays(out_ND, scale_N)])
        ctx.save_for_backward(rows_ND, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_ND, weight, scale_N = ctx.saved_tensors
        grad_ND = grad.contiguous().view(rows_ND.shape)
        of_rows_ND, of_weight = torch.empty_like(rows_ND), torch.zeros_like(weight)
        norm_backward_loop(*_arrays(grad_ND, rows_ND, _lent(weight), scale_N, of_rows_ND, of_weight))
        return of_rows_ND.view(grad.shape), of_weight, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        gate_loop(*(part.reshape(-1) for part in _arrays(gate, up, out)))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        gate_backward_loop(*(part.reshape(-1) for part in _arrays(grad.contiguous(), gate, up, of_gate, of_up)))
        return of_gate, of_up


class _Rotary(torch.autograd.Function):
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
            norm_loop(*[*_arrays(rows, _lent(weight)), np.float32(eps), *_arrays(to, scale.view(-1))])
            saved = [heads, weight, scale]
        rotate_loop(*_arrays(out, cos, sin))
        ctx.save_for_backward(cos, sin, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        cos, sin, *saved = ctx.saved_tensors
        of_out = grad.clone(memory_format=torch.contiguous_format)
        rotate_backward_loop(*_arrays(of_out, cos, sin))
        if not saved:
            return of_out, None, None, None, None
        heads, weight, scale = saved
        of_heads, of_weight = torch.empty_like(heads), torch.zeros_like(weight)
        of_out, rows, to = (part.view(-1, heads.shape[2]) for part in (of_out, heads, of_heads))
        norm_backward_loop(*_arrays(of_out, rows, _lent(weight), scale.view(-1), to, of_weight))
        return of_heads, of_weight, None, None, None


# ------------------------------------------------------------ the exponential function
#
# Plain arithmetic in float32, so that compiled loops compute several at once: the C library's function would be called
# for one number at a time. Within 1e-7 of the true value, relatively, from e to the -87 to e to the 88; numbers beyond
# are replaced by these bounds. NaN stays NaN. The polynomial is that of the Cephes library (Moshier, `expf`).

_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts, of which the first has so few bits that its multiples are exact.
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ROUNDS = np.float32(12582912.0)  # a number that is added to it is rounded to a whole number
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)


@inlined
def exponential(x: Any) -> Any:
    x = _LEAST if x < _LEAST else x
    x = _MOST if x > _MOST else x
    n = (x * _LOG2E + _ROUNDS) - _ROUNDS
    r = (x - n * _LN2) - n * _LN2_REST
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    return (p * (r * r) + r + _ONE) * np.int32((np.int32(n) + 127) << 23).view(np.float32)


# ------------------------------------------------------------ loops


@fastmath
def norm_loop(x: Array, weight: Array, eps: Any, out: Array, scale: Array) -> None:
    size = x.shape[1]
    for n in range(len(x)):
        total = _ZERO
        for d in range(size):
            total += x[n, d] * x[n, d]
        scale[n] = _ONE / math.sqrt(total / np.float32(size) + eps)
        for d in range(size):
            out[n, d] = x[n, d] * scale[n] * weight[d]


@fastmath
def norm_backward_loop(grad: Array, x: Array, weight: Array, scale: Array, of_x: Array, of_weight: Array) -> None:
    size = x.shape[1]
    for n in range(len(x)):
        along, r = _ZERO, scale[n]
        for d in range(size):
            along += grad[n, d] * weight[d] * x[n, d]
        factor = along * r * r * r / np.float32(size)
        for d in range(size):
            of_x[n, d] = grad[n, d] * weight[d] * r - x[n, d] * factor
        for d in range(size):
            of_weight[d] += grad[n, d] * x[n, d] * r


@fastmath
def gate_loop(gate: Array, up: Array, out: Array) -> None:
    for i in range(len(gate)):
        out[i] = gate[i] / (_ONE + exponential(-gate[i])) * up[i]


@fastmath
def gate_backward_loop(grad: Array, gate: Array, up: Array, of_gate: Array, of_up: Array) -> None:
    for i in range(len(gate)):
        share = _ONE / (_ONE + exponential(-gate[i]))
        of_up[i] = grad[i] * gate[i] * share
        of_gate[i] = grad[i] * up[i] * share * (_ONE + gate[i] * (_ONE - share))


@fastmath
def rotate_loop(heads: Array, cos: Array, sin: Array) -> None:
    """Rotate in place: number d of a head and the one half a head further are the two coordinates of a point."""
    half = heads.shape[2] // 2
    for t in range(len(heads)):
        for h in range(heads.shape[1]):
            for d in range(half):
                x, y = heads[t, h, d], heads[t, h, half + d]
                heads[t, h, d] = x * cos[t, d] - y * sin[t, d]
                heads[t, h, half + d] = y * cos[t, half + d] + x * sin[t, half + d]


@fastmath
def rotate_backward_loop(heads: Array, cos: Array, sin: Array) -> None:
    """Replace the gradients of rotated heads by those of the heads before."""
    half = heads.shape[2] // 2
    for t in range(len(heads)):
        for h in range(heads.shape[1]):
            for d in range(half):
                x, y = heads[t, h, d], heads[t, h, half + d]
                heads[t, h, d] = x * cos[t, d] + y * sin[t, half + d]
                heads[t, h, half + d] = y * cos[t, half + d] - x * sin[t, d]
