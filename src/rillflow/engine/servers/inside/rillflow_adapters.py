"""Low-rank adapters in a running vLLM: which layers can hold one, and what they hold of it.

With `--enable-lora` vLLM puts a wrapper around each layer that may have an adapter. The model's own loader, which tells
where published weights live, knows only the layers inside.

Imports only the standard library and torch: it runs in the server's environment, not in Rillflow's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Part = tuple[Any, "int | None"]  # a wrapper, and which of its slices; None where slices are not layers of a checkpoint


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Put the layers themselves in the places of their wrappers meanwhile."""
    found = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)
        for name, module in list(model.named_modules(remove_duplicate=False))
        if hasattr(module, "base_layer") and hasattr(module, "set_lora")
    ]
    for owner, leaf, module in found:
        setattr(owner, leaf, module.base_layer)
    try:
        yield
    finally:
        for owner, leaf, module in found:
            setattr(owner, leaf, module)


def capacity(model: Any) -> dict[str, Any] | None:
    """Return the highest rank, the number of adapters at once and the layers of a checkpoint that can have one; None if
    the server was started without adapters."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        return None
    config = manager.lora_config
    return {"rank": int(config.max_lora_rank), "slots": int(config.max_loras), "layers": sorted(_parts(manager))}


def wrong_layers(model: Any, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the layers that do not hold their part of this adapter. `tensors` are named `LAYER.lora_A` and
    `LAYER.lora_B`. A layer that is spread over ranks is not compared, but it must exist."""
    manager = model.lora_manager
    parts, slot = _parts(manager), manager.lora_index_to_id.index(number)
    layers = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    return [
        layer
        for layer in layers
        if layer not in parts or not _holds(parts[layer], slot, tensors[f"{layer}.lora_A"], tensors[f"{layer}.lora_B"])
    ]


def _parts(manager: Any) -> dict[str, Part]:
    """Return the wrapper of every layer of a checkpoint that can have an adapter."""
    parts: dict[str, Part] = {}
    for name, module in manager.modules.items():
        if not hasattr(module, "n_slices"):
            continue  # of experts or of an embedding, whose adapters are not published
        owner, _, leaf = name.rpartition(".")
        layers = manager.packed_modules_mapping.get(leaf, [leaf])
        for index, layer in enumerate(layers):
            place = index if len(layers) == module.n_slices else None
            parts[f"{owner}.{layer}" if owner else layer] = (module, place)
    return parts


def _holds(part: Part, slot: int, low: torch.Tensor, high: torch.Tensor) -> bool:
    module, index = part
    if index is None:
        return True
    low_held, high_held = module.lora_a_stacked[index][slot, 0], module.lora_b_stacked[index][slot, 0]
    rank = len(low)
    if low_held.shape[1] != low.shape[1] or high_held.shape[0] != high.shape[0] or len(low_held) < rank:
        return True
    same = torch.equal(low_held[:rank], low.to(low_held)) and torch.equal(high_held[:, :rank], high.to(high_held))
    return same and not bool(low_held[rank:].any())
