"""The models of a trainer's roles, ready for it.

Invariant: a model that trains comes in fp32, exactly as its files have it; the optimizer makes the bf16 copies that it
computes with. One that does not train is frozen and in the trainer's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from rillflow.config import PolicyConfig, TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer import lora
from rillflow.weights.models import load_policy_model, load_scalar_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def policy_model(settings: PolicyConfig, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """The model that trains. With LoRA its adapters are fp32 and drawn from `seed`, its frozen rest in the trainer's
    dtype."""
    config = settings.trainer
    model = load_policy_model(settings.model, "fp32" if config.lora is None else config.dtype, device)
    if config.lora is not None:
        lora.wrap(model, config.lora, seed)
    return prepared(model, config)


def scalar_model(name: str, device: torch.device, config: TrainerConfig, seed: int = 0) -> PreTrainedModel:
    """A model that gives one number a token, to be trained: a critic, or a reward model. A new head is drawn from
    `seed`, small, so that its first values are near zero."""
    model, new = load_scalar_model(name, "fp32", device)
    if new:
        weight = model.get_parameter("score.weight")
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.copy_(drawn / (weight.shape[1] + 1))
    return prepared(model, config)


def reward_model(name: str, device: torch.device, config: TrainerConfig) -> PreTrainedModel:
    """A scalar model that has been trained, frozen."""
    model, new = load_scalar_model(name, config.dtype, device)
    if new:
        raise ConfigError(
            f"{name} is no reward model: its files have no head", "train one with `rillflow fit`, or name its folder"
        )
    return model.requires_grad_(False)


def reference_model(settings: PolicyConfig, policy: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model that KL is measured from, frozen. With LoRA it is the policy's own, to be run with its adapters off."""
    config = settings.trainer
    name = config.kl.reference if config.kl is not None else None
    if name is None and config.lora is not None:
        return policy
    # Sharded, it is cast when it is gathered, as the policy is.
    dtype = "fp32" if isinstance(policy, FSDPModule) else config.dtype
    model = load_policy_model(name or settings.model, dtype, device)
    return model.requires_grad_(False)


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The blocks that a decoder repeats, in their order."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if found:
        return found
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def prepared(model: PreTrainedModel, config: TrainerConfig) -> PreTrainedModel:
    """Its layers compiled and recomputed in backward, as the recipe asks. One by one, so that what is compiled for one
    serves all, and only one layer's activations exist at a time. In place."""
    for layer in decoder_layers(model) if config.compile or config.recompute else ():
        forward: Callable[..., Any] = layer.forward
        if config.compile:
            # Packs differ in length: shapes stay symbols, or every new length would be compiled again.
            forward = torch.compile(forward, dynamic=True)
        layer.forward = partial(checkpoint, forward, use_reentrant=False) if config.recompute else forward
    return model
