"""Low-rank adapters: what a LoRA policy publishes instead of all its weights, and how they become weights again.

    model.layers.0.self_attn.q_proj.weight.lora_A    rank x in
    model.layers.0.self_attn.q_proj.weight.lora_B    out x rank

Invariant: a weight with an adapter is `W + alpha / rank * B A`, computed in fp32 and then cast to the dtype of `W`,
wherever it is merged; weights without one are the base's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rillflow.errors import CorruptData

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

A, B = ".lora_A", ".lora_B"


@dataclass(frozen=True)
class Adapter:
    """`tensors` are named by the weights they change, with the endings of `A` and `B`."""

    tensors: Tensors
    rank: int
    alpha: float

    @property
    def weights(self) -> list[str]:
        """The names of the weights that it changes."""
        return [name.removesuffix(A) for name in self.tensors if name.endswith(A)]


def merged(base: Tensors, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The base's tensors with the adapter in them; those that it does not change are the base's own, not copies."""
    changed = {}  # by the identity of the base's tensor: a tied weight follows the one it is tied to
    for name in _fitting(base, adapter):
        weight, scale = base[name], adapter.alpha / adapter.rank
        low, high = (adapter.tensors[name + end].to(weight.device, torch.float32) for end in (A, B))
        changed[id(weight)] = torch.addmm(weight.float(), high, low, alpha=scale).to(weight.dtype)
    return {name: changed.get(id(tensor), tensor) for name, tensor in base.items()}


def _fitting(base: Tensors, adapter: Adapter) -> list[str]:
    names = adapter.weights
    if {name + end for name in names for end in (A, B)} != set(adapter.tensors):
        raise CorruptData("an adapter has tensors that do not belong together", "it was changed after it was written")
    for name in names:
        low, high = adapter.tensors[name + A], adapter.tensors[name + B]
        if name not in base or low.ndim != 2 or high.ndim != 2 or low.shape[0] != high.shape[1]:
            raise CorruptData(f"an adapter changes {name}, which the base does not have so", "they do not fit")
        if base[name].shape != (high.shape[0], low.shape[1]):
            raise CorruptData(f"the adapter of {name} has another shape than the base's weight", "they do not fit")
    return names
