"""Low-rank adapters on a frozen model (peft): only they train, in fp32, and only they are published.

Invariant: with its adapters off, a model gives the numbers of the model it was made from, exactly.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rillflow.errors import ConfigError
from rillflow.trainer.parallel.sharding import whole
from rillflow.weights.codec import LORA_A, LORA_B, Adapter, merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.config import LoraConfig

_NAME = "default"
_BASE = ".base_layer."


def wrap(model: PreTrainedModel, config: LoraConfig, seed: int = 0) -> None:
    """Add adapters without effect to the model's linear layers and freeze all other parameters. In place."""
    peft = _peft()
    model.requires_grad_(False)
    wanted = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=_targets(model, config), init_lora_weights=False
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # `_check` refuses what peft warns about
            peft.inject_adapter_in_model(wanted, model, _NAME)
    except ValueError as error:
        raise ConfigError(
            f"this model cannot have adapters: {error}",
            "trainer.lora.targets are names of linear layers, or all-linear",
        ) from error
    _check(model)
    _begin(model, seed)


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the layers that get an adapter: those that the recipe names, or all linear layers but the head."""
    if config.targets != "all-linear":
        return list(config.targets)
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and module is not head]


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters of a model meanwhile; without adapters nothing changes."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter(model: PreTrainedModel, config: LoraConfig) -> Adapter:
    """Return the current adapters, not copied unless they are sharded, named by the weights that they change.
    Collective if they are sharded."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in _layers(model):
        tensors[f"{name}.weight{LORA_A}"] = whole(layer.lora_A[_NAME].weight.detach(), torch.float32)
        tensors[f"{name}.weight{LORA_B}"] = whole(layer.lora_B[_NAME].weight.detach(), torch.float32)
    return Adapter(tensors, config.rank, config.alpha)


def merged_weights(
    model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype, *, here: bool = True
) -> dict[str, torch.Tensor]:
    """Return the merged weights under the names of the model without adapters, as readers of a published adapter do.

    Collective if the model is sharded; a rank that does not need them (`here` False) gets empty tensors.
    """
    cast: dict[int, torch.Tensor] = {}
    base: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        if id(tensor) not in cast:
            cast[id(tensor)] = whole(tensor.detach(), dtype, here=here)
        base[name.replace(_BASE, ".")] = cast[id(tensor)]
    added = adapter(model, config)
    return merged(base, added) if here else base


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _check(model: PreTrainedModel) -> None:
    """Refuse layers whose merged weight is not W + scale * B A."""
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    for name, layer in _layers(model):
        if type(layer.get_base_layer()) is not torch.nn.Linear:
            raise ConfigError(f"{name} is not a linear layer", "remove it from trainer.lora.targets")
        if tied and layer is model.get_output_embeddings():
            raise ConfigError(f"{name} shares its weight with the embedding", "remove it from trainer.lora.targets")


@torch.no_grad()
def _begin(model: PreTrainedModel, seed: int) -> None:
    """Draw A as peft does, but equal on every device and rank; set B to zero."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in _layers(model):
        low, high = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        low.data = low.data.float()
        high.data = torch.zeros_like(high, dtype=torch.float32)
        drawn = torch.empty(low.shape)
        torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        low.copy_(drawn)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("trainer.lora needs the package peft", "pip install 'rillflow[lora]'") from error
    return peft
