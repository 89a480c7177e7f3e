"""Each compiled kernel of the CPU against its reference in torch: results and gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rillflow.kernels.compile import fastmath
from rillflow.kernels.layers import (
    exponential,
    gate,
    reference_gate,
    reference_rms_norm,
    reference_rotate,
    rms_norm,
    rotate,
)


def drawn(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.requires_grad_(grad)


def compared(
    ours: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    """Two fp32 sums in different orders are about 1e-6 of the largest value apart; gradients add up over tokens."""
    seen = []
    for function in (ours, theirs):
        found = function(*inputs)
        grads = torch.autograd.grad(found, inputs, drawn(*found.shape, seed=9, grad=False))
        seen.append((found.detach(), *grads))
    for mine, reference in zip(*seen, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))


def test_rms_norm() -> None:
    compared(lambda *x: rms_norm(*x, 1e-6), lambda *x: reference_rms_norm(*x, 1e-6), [drawn(3, 5, 24), drawn(24)])


def test_gate() -> None:
    compared(gate, reference_gate, [drawn(3, 5, 24), drawn(3, 5, 24, seed=1)])


@pytest.mark.parametrize("normed", [True, False])
def test_rotate(normed: bool) -> None:
    angles = drawn(7, 8, grad=False)
    tables = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    def ours(heads: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return rotate(heads, (weight[0] if weight else None, 1e-6), *tables)

    def theirs(heads: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return reference_rotate(heads, (weight[0] if weight else None, 1e-6), *tables)

    compared(ours, theirs, [drawn(7, 3, 16), *([drawn(16)] if normed else [])])


def test_exponential() -> None:
    @fastmath
    def all_of(x):
        for i in range(len(x)):
            x[i] = exponential(x[i])

    given = np.linspace(-87, 88, 200_001).astype(np.float32)
    found = given.copy()
    all_of(found)
    exact = np.exp(given.astype(np.float64))
    assert np.abs(found / exact - 1).max() < 2e-7
    odd = np.array([-np.inf, np.inf, np.nan], np.float32)
    all_of(odd)
    assert odd[0] < 1e-37
    assert odd[1] > 1e38
    assert np.isnan(odd[2])
