"""Updates of fp32 masters, whatever the forward pass runs in; the update rules; and the schedule of the learning rate.

Invariants: gradients are summed over the micro-batches in fp32 and over the ranks; all ranks apply the same update, or
none; gradients that are not finite are never applied. The masters are
- the parameters themselves, if they are fp32 and whole;
- fp32 tensors of which the parameters are copies, if the model computes in bf16;
- this rank's shards of the parameters, if they are sharded (DTensors): FSDP has already summed their gradients;
- this rank's parts of them, as above, if ranks share the layers' weights (`parallel.tensor`).

A rule is a `torch.optim.Optimizer`: AdamW, AdamW with 8-bit moments, or Muon. Muon updates the matrices of the decoder
layers, and AdamW everything else. Its steps are scaled to the size of AdamW's, so that both take the same learning rate
and weight decay. `flat_state` and `nested_state` are inverse, so a checkpoint of plain tensors continues exactly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rillflow.errors import CheckpointError, ConfigError
from rillflow.trainer import lora
from rillflow.trainer.offload import Moments
from rillflow.trainer.parallel.sharding import Shards, decoder_layers, shards_of, whole
from rillflow.trainer.parallel.tensor import Part, add_over_teams, held_of, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.config import TrainerConfig
    from rillflow.contracts import Tensors
    from rillflow.trainer.parallel import Peers
    from rillflow.weights.codec import Adapter

log = logging.getLogger(__name__)

STEP = "step"  # the number of a parameter's updates, among its moments
_SIGNED = "exp_avg"  # the moment of AdamW that has a sign
_PART = 1 << 28  # most weights that an offloaded rule updates at once: 2 GB of moments


class Optimizer:
    """Updates the model's trainable parameters. For bf16 it replaces the model's fp32 parameters by bf16 copies."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, peers: Peers) -> None:
        self.steps = 0
        self._model = model
        self._config = config
        self._peers = peers
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Adapters stay fp32: they are small, and their changes even smaller.
        lower = torch.bfloat16 if config.dtype == "bf16" and config.lora is None else None
        self._masters = {name: _master(parameter, lower) for name, parameter in self._parameters.items()}
        self._rules = make_rules(config, model, self._masters)
        self._away = Moments(self._rules, self._moments_in) if config.offloads("optimizer") else None

    # ------------------------------------------------------------ gradients and updates

    def zero(self) -> None:
        """Drop the gradients."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    @torch.no_grad()
    def update(self, scale: float) -> dict[str, float]:
        """Apply the gradients' sum over the ranks, times `scale`, at this step's learning rate."""
        lr = learning_rate(self._config, self.steps)
        for rule in self._rules:
            set_rate(rule, lr)
        gradients = self._gradients()
        if gradients:
            torch._foreach_mul_(gradients, scale)
        norm = self._norm()
        applied = bool(norm.isfinite()) and bool(gradients)
        if applied:
            clip_grads_with_norm_(self._masters.values(), self._config.max_grad_norm, norm)
            for rule in self._rules:
                with self._away.here(rule) if self._away is not None else nullcontext():
                    rule.step()
            self._lower()
        else:
            log.warning("step %d is skipped: its gradients are missing or not finite", self.steps + 1)
        self.steps += 1
        return {"grad_norm": float(norm), "lr": lr, "skipped": float(not applied)}

    def _gradients(self) -> list[torch.Tensor]:
        """Return the masters' gradients, summed over the ranks."""
        for parameter, master in self._pairs():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                master.grad = parameter.grad.to_local()
        if self._peers.size > 1:
            self._add_over_ranks()
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def _add_over_ranks(self) -> None:
        """Add gradients over ranks. A rank without rows has none; it adds zeros if another rank has some."""
        there = self._peers.total([float(master.grad is not None) for master in self._masters.values()])
        apart: list[torch.Tensor] = []
        for (parameter, master), ranks in zip(self._pairs(), there, strict=True):
            if not ranks:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if isinstance(parameter, Part):
                add_over_teams(parameter, master.grad)
            elif not isinstance(parameter, DTensor):
                apart.append(master.grad)
        self._peers.add(apart)

    def _norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        shards = [m.grad for p, m in self._pairs() if m.grad is not None and isinstance(p, DTensor | Part)]
        rest = [m.grad for p, m in self._pairs() if m.grad is not None and not isinstance(p, DTensor | Part)]
        norm = get_total_norm(rest)
        if not any(isinstance(parameter, DTensor | Part) for parameter in self._parameters.values()):
            return norm
        square = self._peers.total([float(get_total_norm(shards)) ** 2])[0] / self._config.held_alike
        square += float(norm) ** 2
        return torch.tensor(math.sqrt(square), device=next(iter(self._masters.values())).device)

    def _lower(self) -> None:
        """Copy the masters into the lower-precision parameters."""
        pairs = [(p, m) for p, m in self._pairs() if p.dtype != m.dtype]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        return list(zip(self._parameters.values(), self._masters.values(), strict=True))

    # ------------------------------------------------------------ weights and state

    def weights(self, dtype: torch.dtype, *, here: bool = True) -> dict[str, torch.Tensor]:
        """Return the current weights as engines load them: whole, tied ones under each of their names, adapters merged.

        They are valid until the next update. All ranks of a sharded model must call this; a rank that does not need
        them (`here` False) gets empty tensors.
        """
        if self._config.lora is not None:
            return lora.merged_weights(self._model, self._config.lora, dtype, here=here)
        own, aliases = self._state(dtype)
        cast = {name: whole(tensor, dtype, here=here) for name, tensor in own.items()}
        return cast | {alias: cast[name] for alias, name in aliases.items()}

    def shards(self, dtype: torch.dtype) -> Shards:
        """Return this rank's part of the weights. All ranks must call this."""
        return shards_of(*self._state(), dtype, self._peers)

    def adapter(self) -> Adapter | None:
        """Return the adapter with LoRA, else None; valid until the next update. Collective if it is sharded."""
        return None if self._config.lora is None else lora.adapter(self._model, self._config.lora)

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the exact weights, each tied one once; with LoRA only the adapters. Shared ones are DTensors.
        Collective if there are some."""
        if self._config.lora is not None:
            return {
                name: (parameter if isinstance(parameter, DTensor) else master).detach()
                for (name, master), parameter in zip(self._masters.items(), self._parameters.values(), strict=True)
            }
        return self._state()[0]

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the rules' state, by `moment/parameter`, sharded as the parameter is; empty before the first step."""
        away = self._away.values() if self._away is not None else {}
        return {
            f"{moment}/{name}": tensor
            if moment == STEP
            else _like(away.get(id(tensor), tensor), self._parameters[name])
            for name, master in self._masters.items()
            for moment, tensor in flat_state(self._moments_of(master))
        }

    @torch.no_grad()
    def restore(self, masters: Tensors, moments: Tensors, steps: int) -> None:
        """Continue exactly from these `masters`, `moments` and `steps`; of a sharded tensor, from this rank's shard."""
        own = {name: _local(tensor) for name, tensor in self.masters().items()}
        given = {name: _local(tensor) for name, tensor in masters.items()}
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in given.items()}:
            raise CheckpointError(
                "the checkpoint belongs to another model", "resume with the recipe the run was started with"
            )
        for name, tensor in given.items():
            parameter = self._parameters.get(name)
            if isinstance(parameter, Part):
                self._masters[name].copy_(held_of(tensor, parameter))
            else:
                own[name].copy_(tensor)
        self._lower()
        for rule in self._rules:
            rule.load_state_dict(self._rule_state(rule, moments))
            if self._away is not None:
                self._away.replaced(rule)
        self.steps = steps

    def idle(self) -> list[torch.Tensor]:
        """Return the tensors that only an update needs: the moments, unless they are away anyway, and masters that are
        not the model's parameters."""
        moments = [moment for rule in self._rules for moment in self._moments_in(rule)] if self._away is None else []
        return moments + [master for parameter, master in self._pairs() if parameter.dtype != master.dtype]

    def _moments_in(self, rule: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the moments of a rule but the numbers of updates."""
        states = [rule.state[master] for master in self._masters.values() if master in rule.state]
        return [tensor for state in states for moment, tensor in flat_state(state) if moment != STEP]

    def _moments_of(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        return next((rule.state[master] for rule in self._rules if master in rule.state), {})

    def _rule_state(self, rule: torch.optim.Optimizer, moments: Tensors) -> dict[str, Any]:
        """Return the state that a rule loads: of each of its parameters, by number, the moments."""
        names = {id(master): name for name, master in self._masters.items()}
        flat: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in moments.items():
            moment, _, name = key.partition("/")
            parameter, held = self._parameters.get(name), _local(tensor)
            if isinstance(parameter, Part) and moment != STEP:
                held = held_of(held, parameter)
            flat.setdefault(name, {})[moment] = held
        own = [(number, names[id(m)], m.dtype) for number, m in enumerate(rule.param_groups[0]["params"])]
        state = {number: nested_state(flat[name], rule, dtype) for number, name, dtype in own if name in flat}
        return {"state": state, "param_groups": rule.state_dict()["param_groups"]}

    def _state(self, dtype: torch.dtype | None = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the model's state with masters in place of copies in other dtypes than `dtype`, each tied tensor once,
        and for each other name of a tied tensor the name under which it is stored."""
        masters = {id(self._parameters[name]): master for name, master in self._masters.items()}
        first: dict[int, str] = {}
        kept: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) in first:
                aliases[name] = first[id(tensor)]
                continue
            first[id(tensor)] = name
            as_it_is = isinstance(tensor, DTensor) or tensor.dtype == dtype
            found = (tensor if as_it_is else masters.get(id(tensor), tensor)).detach()
            kept[name] = rows_of(found, tensor) if isinstance(tensor, Part) else found
        return kept, aliases


def _master(parameter: torch.nn.Parameter, lower: torch.dtype | None) -> torch.Tensor:
    """Return the fp32 tensor that updates are applied to. With `lower`, the parameter becomes a copy of that dtype."""
    if isinstance(parameter, DTensor):
        return _local(parameter.detach())
    if lower is None:
        return parameter
    master = parameter.detach().clone()
    parameter.data = parameter.data.to(lower)
    parameter.register_post_accumulate_grad_hook(_adding_to(master))  # type: ignore[no-untyped-call]
    return master


def _adding_to(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds the gradient of each micro-batch to the master's, in fp32."""

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is sharded as the parameter is, and outside of a step by rows."""
    if isinstance(parameter, Part):
        return rows_of(shard, parameter)
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


# ---------------------------------------------------------------- update rules


def make_rules(
    config: TrainerConfig, model: PreTrainedModel, masters: Mapping[str, torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Return the rules that together update all `masters`, which have the names of the model's parameters. With
    offloaded moments each has a part of them, so that only the moments of this part are on the device at once."""
    most = _PART if config.offloads("optimizer") else None
    if config.optimizer == "adamw_8bit":
        return [_adamw_8bit()(part, **_adamw_options(config)) for part in _parts(list(masters.values()), most)]
    matrices = _matrices(model) if config.optimizer == "muon" else set()
    by_muon = [master for name, master in masters.items() if name in matrices]
    rest = [master for name, master in masters.items() if name not in matrices]
    options: Any = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    rules: list[torch.optim.Optimizer] = [torch.optim.Muon(part, **options) for part in _parts(by_muon, most)]
    rules += [torch.optim.AdamW(part, fused=True, **_adamw_options(config)) for part in _parts(rest, most)]
    return rules


def _parts(masters: list[torch.Tensor], most: int | None) -> list[list[torch.Tensor]]:
    """Return the masters in parts. A part has at most `most` weights, or is one larger tensor."""
    parts: list[list[torch.Tensor]] = []
    size = 0
    for master in masters:
        size += master.numel()
        if not parts or (most is not None and size > most):
            parts.append([])
            size = master.numel()
        parts[-1].append(master)
    return parts


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
