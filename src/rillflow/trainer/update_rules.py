"""The update rules of an optimizer: AdamW, AdamW with 8-bit moments, Muon; and the schedule of the learning rate.

A rule is a `torch.optim.Optimizer`. Muon updates the matrices of the decoder layers, and AdamW everything else. Its
steps are scaled to the size of AdamW's, so that both take the same learning rate and weight decay.

Invariant: `flat_state` and `nested_state` are inverse, so a checkpoint of plain tensors continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rillflow.errors import CheckpointError, ConfigError
from rillflow.trainer.parallel.sharding import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.config import TrainerConfig
    from rillflow.contracts import Tensors

STEP = "step"  # the number of a parameter's updates, among its moments
_SIGNED = "exp_avg"  # the moment of AdamW that has a sign


def make_rules(
    config: TrainerConfig, model: PreTrainedModel, masters: Mapping[str, torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Return the rules that together update all `masters`, which have the names of the model's parameters."""
    if config.optimizer == "adamw_8bit":
        return [_adamw_8bit()(list(masters.values()), **_adamw_options(config))]
    matrices = _matrices(model) if config.optimizer == "muon" else set()
    by_muon = [master for name, master in masters.items() if name in matrices]
    rest = [master for name, master in masters.items() if name not in matrices]
    rules: list[torch.optim.Optimizer] = []
    if by_muon:
        options: Any = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        rules.append(torch.optim.Muon(by_muon, **options))
    if rest:
        rules.append(torch.optim.AdamW(rest, fused=True, **_adamw_options(config)))
    return rules


def _adamw_options(config: TrainerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _matrices(model: PreTrainedModel) -> set[str]:
    """Return the names of the matrices in the decoder layers: not embeddings, heads, norms or stacks of experts."""
    inside = {id(weight) for layer in decoder_layers(model) for weight in layer.parameters() if weight.ndim == 2}
    return {name for name, weight in model.named_parameters() if id(weight) in inside}


def _adamw_8bit() -> Any:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "trainer.optimizer: adamw_8bit needs the package torchao", "pip install torchao, or set optimizer: adamw"
        ) from error
    return AdamW8bit


def set_rate(rule: torch.optim.Optimizer, rate: float) -> None:
    for group in rule.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # compiled code reads this tensor
        else:
            group["lr"] = rate


# ---------------------------------------------------------------- the learning rate


def learning_rate(config: TrainerConfig, update: int) -> float:
    """Return the rate of an update, counted from 0.

    It rises linearly over `warmup_steps` updates to `lr`, then falls as the schedule says to `lr` times `min_lr` at
    the last update of the run: linearly, as a half cosine, or (wsd) linearly over the last `decay_steps` updates only.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    total = config.steps * config.updates * config.epochs
    begin = max(total - config.decay_steps, config.warmup_steps) if config.decay_steps else config.warmup_steps
    if config.schedule == "constant" or update < begin:
        return config.lr
    done = min((update - begin + 1) / max(total - begin, 1), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr + (1 - config.min_lr) * left)


# ---------------------------------------------------------------- states as plain tensors


def flat_state(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter's moments by name; of a quantised one its parts, as `exp_avg.codes`."""
    for moment, value in state.items():
        if hasattr(value, "__tensor_flatten__"):
            for part in value.__tensor_flatten__()[0]:
                yield f"{moment}.{part}", getattr(value, part)
        else:
            yield moment, value


def nested_state(flat: Tensors, rule: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state that `flat_state` was given, copied, for a parameter of `rule`."""
    _check_moments(flat, rule)
    nested: dict[str, Any] = {}
    for name, tensor in flat.items():
        moment, _, part = name.partition(".")
        if part:
            nested.setdefault(moment, {})[part] = tensor.clone()
        else:
            nested[moment] = tensor.clone()
    return {
        moment: _quantised(moment, value, dtype) if isinstance(value, dict) else value
        for moment, value in nested.items()
    }


def _check_moments(flat: Tensors, rule: torch.optim.Optimizer) -> None:
    """Raise CheckpointError if the moments are not those of `rule`. Only 8-bit moments may have parts."""
    whole = isinstance(rule, torch.optim.AdamW | torch.optim.Muon)
    found = set(flat) if whole else {moment.partition(".")[0] for moment in flat}
    if found != ({"momentum_buffer"} if isinstance(rule, torch.optim.Muon) else {"exp_avg", "exp_avg_sq", STEP}):
        raise CheckpointError(
            "the checkpoint was written with another trainer.optimizer",
            "resume with the recipe the run was started with",
        )


def _quantised(moment: str, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    made: torch.Tensor = OptimState8bit(parts["codes"], parts["scale"], parts["qmap"], moment == _SIGNED, dtype)
    return made
