"""Tensors for the tests of deltas."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def of_bits(bits: list[int] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    kind = np.uint32 if dtype == torch.float32 else np.uint16
    raw = np.array(bits, dtype=np.uint32).astype(kind)
    return torch.from_numpy(raw.view(np.int32 if dtype == torch.float32 else np.int16)).view(dtype)


def bits_of(tensor: torch.Tensor) -> bytes:
    same_size = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.contiguous().reshape(-1).view(same_size).numpy().tobytes()


def updates(
    count: int, lr: float, steps: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copies before and after each of some AdamW steps on fp32 masters."""
    source = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(count, generator=source) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    trend = 0.3 * torch.randn(count, generator=source)
    old = master.detach().to(dtype, copy=True)
    for _ in range(steps):
        master.grad = trend + torch.randn(count, generator=source)
        optimizer.step()
        new = master.detach().to(dtype, copy=True)
        yield old, new
        old = new


def sparse_pair(count: int = 5000, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """A small tensor with changes of all kinds."""
    rng = np.random.default_rng(1)
    base = torch.from_numpy(rng.normal(0, 0.02, count).astype(np.float32)).to(dtype)
    new = base.clone()
    some = torch.from_numpy(rng.choice(count, count // 20, replace=False))
    new[some] = new[some] * (1 + torch.from_numpy(rng.normal(0, 0.02, len(some)).astype(np.float32))).to(dtype)
    new[7] = float("nan")
    new[8] = -0.0
    return base, new
