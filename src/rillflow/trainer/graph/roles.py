"""The models of a chain's roles, ready to score and to learn."""

from __future__ import annotations

from collections.abc import Set

import torch

from rillflow.config import CriticConfig, PolicyConfig, TrainerConfig
from rillflow.trainer import models
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.parallel.sharding import shard


class Roles:
    """Makes each role's learner. A sharded model is loaded into the host's memory; only its shards reach the device."""

    def __init__(self, settings: PolicyConfig, peers: Peers, device: torch.device, seed: int, in_order: bool) -> None:
        self._settings = settings
        self._config = settings.trainer
        self._peers = peers
        self._device = device
        self._seed = seed
        self._in_order = in_order
        self._policy = models.policy_model(settings, self._loaded_on, seed)
        shard(self._policy, self._config, peers, device)

    @property
    def _loaded_on(self) -> torch.device:
        return torch.device("cpu") if self._config.sharding == "fsdp" and self._peers.size > 1 else self._device

    @property
    def _exact(self) -> bool:
        """Whether log-probs are to have the bits of the engine: where that is possible."""
        config = self._config
        whole = not (config.trees or config.recompute or config.compile or config.lora or config.sharding != "none")
        return self._in_order and self._settings.engine.kind == "embedded" and whole

    def learners(self, roles: Set[str]) -> dict[str, Learner]:
        """A function of the role reward brings its own model: nothing in a recipe names one."""
        makers = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {role: make() for role, make in makers.items() if role in roles}

    def actor(self) -> Learner:
        optimizer = Optimizer(self._policy, self._config, self._peers)
        forward = PolicyForward(self._policy, self._config, exact=self._exact)
        return self._learner("actor", self._policy, forward, optimizer, self._config)

    def reference(self) -> Learner:
        model = models.reference_model(self._settings, self._policy, self._loaded_on)
        if model is not self._policy:
            shard(model, self._config, self._peers, self._device)
        forward = PolicyForward(model, self._config, adapters=False)
        return self._learner("reference", model, forward, None, self._config)

    def critic(self) -> Learner:
        wanted = self._config.critic or CriticConfig()
        config = self._config.model_copy(update={"lr": wanted.lr or self._config.lr, "lora": None})
        model = models.scalar_model(wanted.model or self._settings.model, self._loaded_on, config, self._seed)
        shard(model, config, self._peers, self._device)
        optimizer = Optimizer(model, config, self._peers)
        return self._learner("critic", model, ScalarForward(model, config), optimizer, config)

    def _learner(
        self,
        role: str,
        model: torch.nn.Module,
        forward: PolicyForward | ScalarForward,
        optimizer: Optimizer | None,
        config: TrainerConfig,
    ) -> Learner:
        return Learner(role, model, forward, optimizer, config, self._peers, in_order=self._in_order)
