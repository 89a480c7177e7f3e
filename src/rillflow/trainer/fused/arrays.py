"""Tensors as compiled loops take them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def lent(weight: torch.Tensor) -> torch.Tensor:
    """A copy: what an array has looked into cannot be resized any more, and a sharded model's weights are."""
    return weight.detach().clone()


def arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]
