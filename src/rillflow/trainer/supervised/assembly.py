"""Puts a supervised run's model, its way of computing and its step graph together, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rillflow.config import PolicyConfig
from rillflow.config.supervised import FitRecipe
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.planner import plan
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.models import policy_model, scalar_model
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.parallel.sharding import shard
from rillflow.trainer.supervised.functions import graph_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Trained:
    """The worker of a step graph in which one model learns."""

    worker: Worker
    learner: Learner
    model: PreTrainedModel


def assemble(recipe: FitRecipe, peers: Peers, device: torch.device) -> Trained:
    config = recipe.trainer
    # Of a sharded model only its shards reach the device.
    loaded_on = torch.device("cpu") if config.sharding == "fsdp" and peers.size > 1 else device
    model, role = _model(recipe, loaded_on)
    shard(model, config, peers, device)
    optimizer = Optimizer(model, config, peers)
    forward: Callable[..., Any] = (PolicyForward if role == "actor" else ScalarForward)(model, config)
    learner = Learner(role, model, forward, optimizer, config, peers, in_order=recipe.runtime.deterministic)
    chain = plan(graph_of(recipe), ranks=peers.size)
    # An algorithm is what a worker wants; no node of these graphs asks for one.
    worker = Worker(chain, {role: learner}, ALGORITHMS[config.algorithm](config), config, peers)
    return Trained(worker, learner, model)


def _model(recipe: FitRecipe, device: torch.device) -> tuple[PreTrainedModel, str]:
    if recipe.task == "sft":
        settings = PolicyConfig(model=recipe.model, trainer=recipe.trainer)
        return policy_model(settings, device, seed=recipe.seed), "actor"
    return scalar_model(recipe.model, device, recipe.trainer, seed=recipe.seed), "reward"
