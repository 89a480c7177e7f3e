"""Builds a trainer's worker: the models of its roles, their optimizers and learners, and its chain of nodes.

Invariant: a model that trains is loaded in fp32, exactly as in its files; the optimizer makes the bf16 copies that it
computes with. A model that does not train is frozen and in the trainer's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from rillflow.config import CriticConfig, PolicyConfig, Recipe, TrainerConfig
from rillflow.contracts import Clock
from rillflow.errors import ConfigError
from rillflow.trainer import lora
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import staged_columns
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.builtin import Mode, chain_of
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.offload import check_offload, offloaded_input
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.context import Context
from rillflow.trainer.parallel.sharding import decoder_layers, load_shards, shard
from rillflow.trainer.parallel.tensor import split
from rillflow.weights.models import load_policy_model, load_scalar_model, pick_device, rotary_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def policy_model(settings: PolicyConfig, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Load the model that trains. With LoRA its adapters are fp32 and drawn from `seed`, and the frozen rest is in the
    trainer's dtype."""
    config = settings.trainer
    model = load_policy_model(settings.model, "fp32" if config.lora is None else config.dtype, device)
    if config.lora is not None:
        lora.wrap(model, config.lora, seed)
    return prepared(model, config)


def scalar_model(name: str, device: torch.device, config: TrainerConfig, seed: int = 0) -> PreTrainedModel:
    """Load a model to train that gives one number for each token: a critic or a reward model. A new head is drawn from
    `seed` with small values, so its first outputs are near zero."""
    model, new = load_scalar_model(name, "fp32", device)
    if new:
        weight = model.get_parameter("score.weight")
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.copy_(drawn / (weight.shape[1] + 1))
    return prepared(model, config)


def reward_model(name: str, device: torch.device, config: TrainerConfig) -> PreTrainedModel:
    """Load a trained scalar model, frozen."""
    model, new = load_scalar_model(name, config.dtype, device)
    if new:
        raise ConfigError(
            f"{name} is not a reward model: its files have no head", "train one with `rillflow fit`, or name its folder"
        )
    return model.requires_grad_(False)


def reference_model(settings: PolicyConfig, policy: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Load the reference of the KL term, frozen. With LoRA it is the policy itself, run with its adapters off."""
    config = settings.trainer
    name = config.kl.reference if config.kl is not None else None
    if name is None and config.lora is not None:
        return policy
    # A sharded model is cast when it is gathered, as the policy is.
    dtype = "fp32" if isinstance(policy, FSDPModule) else config.dtype
    model = load_policy_model(name or settings.model, dtype, device)
    return model.requires_grad_(False)


def prepared(model: PreTrainedModel, config: TrainerConfig) -> PreTrainedModel:
    """Compile the model's layers and recompute them in backward, as the recipe asks. In place.

    Layer by layer, so the code compiled for one serves all, and only one layer's activations exist at a time.
    """
    away = config.offloads("activations")
    for layer in decoder_layers(model) if config.compile or config.recompute else ():
        forward = _recomputed(layer.forward, keep=not away) if config.recompute else layer.forward
        # Packs differ in length: with fixed shapes every new length would be compiled again.
        forward = torch.compile(forward, dynamic=True) if config.compile else forward
        layer.forward = offloaded_input(forward) if away else forward
    return model


def _recomputed(forward: Callable[..., Any], *, keep: bool) -> Callable[..., Any]:
    """Return a layer's forward whose activations are computed again in backward. With `keep` the result of attention is
    not: it is as small as a hidden state, and with long rows it takes most of the time."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_keeping_attention, **kwargs)

    def run_whole(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run if keep else run_whole


def _keeping_attention() -> Any:
    kept = [torch.ops.rillflow.forest_attention.default]
    return create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- learners


class Roles:
    """Makes the learner of each role. A rank reads only its shards of a sharded policy; other sharded models are loaded
    into host memory, and only their shards reach the device."""

    def __init__(self, settings: PolicyConfig, peers: Peers, device: torch.device, seed: int, in_order: bool) -> None:
        self._settings = settings
        self._config = settings.trainer
        self._peers = peers
        self._device = device
        self._seed = seed
        self._in_order = in_order
        check_offload(self._config, device)
        self._context = Context.of(self._config, peers)
        self._policy = self._sharded_policy() or policy_model(settings, self._loaded_on, seed)
        _check_rotary(self._policy.config, settings.engine.context)
        if not isinstance(self._policy, FSDPModule):
            self._spread(self._policy)

    def _spread(self, model: PreTrainedModel) -> None:
        """Keep this rank's part of a model, on the device."""
        shard(model, self._config, self._peers, self._device)
        split(model, self._config, self._peers, self._context.group, self._device)

    @property
    def _loaded_on(self) -> torch.device:
        parts = self._config.sharding == "fsdp" or self._config.tensor_ranks > 1
        return torch.device("cpu") if parts and self._peers.size > 1 else self._device

    def _sharded_policy(self) -> PreTrainedModel | None:
        """Load the policy by shards, if it is sharded, trains whole, and its files can be read by rows."""
        config, peers = self._config, self._peers
        if config.sharding == "none" or peers.size == 1 or config.lora is not None:
            return None

        def cut(model: PreTrainedModel) -> None:
            shard(prepared(model, config), config, peers, self._device)

        return load_shards(self._settings.model, cut, peers, self._device)

    @property
    def _exact(self) -> bool:
        """Return whether log-probs can have exactly the bits of the engine's."""
        config = self._config
        whole = not (config.trees or config.recompute or config.compile or config.lora or config.lockstep)
        whole = whole and not (config.router_loss or config.replay_routing)
        return self._in_order and self._settings.engine.kind == "embedded" and whole

    def learners(self, roles: Set[str]) -> dict[str, Learner]:
        """Return the learners of these roles. A function of the role reward brings its own model."""
        makers = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {role: make() for role, make in makers.items() if role in roles}

    def actor(self) -> Learner:
        optimizer = Optimizer(self._policy, self._config, self._peers)
        forward = PolicyForward(self._policy, self._config, exact=self._exact, context=self._context)
        return self._learner("actor", self._policy, forward, optimizer, self._config)

    def reference(self) -> Learner:
        model = reference_model(self._settings, self._policy, self._loaded_on)
        if model is not self._policy:
            self._spread(model)
        # Its routers choose their own experts.
        config = self._config.model_copy(update={"router_loss": 0.0, "replay_routing": False})
        forward = PolicyForward(model, config, adapters=False, context=self._context)
        return self._learner("reference", model, forward, None, self._config)

    def critic(self) -> Learner:
        wanted = self._config.critic or CriticConfig()
        config = self._config.model_copy(update={"lr": wanted.lr or self._config.lr, "lora": None})
        model = scalar_model(wanted.model or self._settings.model, self._loaded_on, config, self._seed)
        self._spread(model)
        optimizer = Optimizer(model, config, self._peers)
        forward = ScalarForward(model, config, context=self._context)
        return self._learner("critic", model, forward, optimizer, config)

    def _learner(
        self,
        role: str,
        model: torch.nn.Module,
        forward: PolicyForward | ScalarForward,
        optimizer: Optimizer | None,
        config: TrainerConfig,
    ) -> Learner:
        return Learner(role, model, forward, optimizer, config, self._peers, in_order=self._in_order)


def _check_rotary(config: Any, context: int) -> None:
    """Refuse rows that would change the rotary embedding of the shorter rows of their micro-batch."""
    limit = rotary_limit(config)
    if limit is not None and context > limit:
        raise ConfigError(
            f"the trainer cannot train {type(config).__name__} with {context} tokens: a row of more than {limit} "
            "changes the rotary embedding of all rows that are computed with it",
            f"set engine.context to {limit} or less",
        )


# ---------------------------------------------------------------- the worker

# Errors that the code of an unsupported model raises. Errors of other ranks are RuntimeErrors.
_UNSUPPORTED = (ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError, AssertionError)


def build_worker(
    recipe: Recipe,
    policy: str,
    peers: Peers,
    *,
    device: torch.device | None = None,
    mode: Mode | None = None,
    clock: Clock | None = None,
    roles: type[Roles] = Roles,
) -> Worker:
    """Build everything that trains `policy` on this rank, by default on the device and in the mode of the recipe.

    Collective.
    """
    settings = recipe.policies[policy]
    config = settings.trainer
    chain = chain_of(config, mode or recipe.mode, staged=staged_columns(settings.stages))
    made = roles(settings, peers, device or pick_device(config.device), recipe.seed, recipe.runtime.deterministic)
    algorithm = ALGORITHMS[config.algorithm](config)
    try:
        learners = made.learners(chain.roles)
    except _UNSUPPORTED as error:  # the next start would fail in the same way
        raise ConfigError(
            f"the trainer cannot build {settings.model}: {type(error).__name__}: {error}",
            "train a model of a family that docs/training.md names, or see the traceback in this log",
        ) from error
    return Worker(chain, learners, algorithm, config, peers, seed=recipe.seed, clock=clock)
