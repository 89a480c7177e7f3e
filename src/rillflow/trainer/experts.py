"""Mixtures of experts in the trainer: the routers' balance loss, and the replay of an engine's choices.

A router scores the experts for each token and chooses a few. The engine that sampled a token may have chosen others
than the trainer does, because their roundings differ; then their log-probs differ by more than rounding. With recorded
choices (`Layout.experts_PW`) the routers take those, and weigh them by their own scores, with gradient.

Routers are watched by hooks. They return the scores of all experts, the weights and the numbers of the chosen ones. A
model without such routers has no balance loss and no replay.

Axes: P packed tokens, L routers, K experts that a token is sent to, W = L K, E all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rillflow.engine.experts import routers_of
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

UNKNOWN = -1  # in place of an expert that was not recorded
_CLOSE = 1e-2  # relative distance of two computations of the same weights, at the precision of bf16


def routing_of(model: PreTrainedModel, *, packed: bool) -> Routing:
    """Return the routing of a model, which all users of the model share."""
    if model not in _KNOWN:
        _KNOWN[model] = Routing(model, packed=packed)
    return _KNOWN[model]


def set_choices(model: PreTrainedModel, chosen_PW: torch.Tensor | None) -> None:
    """Let the routers of a model choose these experts in the next pass, or their own. Models without routing ignore
    it."""
    if model in _KNOWN:
        _KNOWN[model].replay(chosen_PW)


class Routing:
    """Watches the routers of a model. `replay` sets what they choose in the next forward pass and its recomputation;
    afterwards `balance` returns the balance loss of that pass."""

    def __init__(self, model: PreTrainedModel, *, packed: bool) -> None:
        self._routers = routers_of(model)
        if not self._routers:
            raise ConfigError(
                f"{type(model).__name__} has no router of experts that the trainer knows",
                "remove trainer.router_loss and trainer.replay_routing",
            )
        if not packed:
            raise ConfigError(
                f"{type(model).__name__} is read in padded rows, whose padding would be routed too",
                "remove trainer.router_loss and trainer.replay_routing, which need packed rows",
            )
        self._weigh: list[Weigh | None] = [None] * len(self._routers)
        self._logits: list[torch.Tensor | None] = [None] * len(self._routers)
        self._chosen_PLK: torch.Tensor | None = None
        for number, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._watch, number))

    def replay(self, chosen_PW: torch.Tensor | None) -> None:
        """Let routers choose these experts; where it is None or UNKNOWN, their own."""
        if chosen_PW is None:
            self._chosen_PLK = None
            return
        routers = len(self._routers)
        if chosen_PW.shape[1] % routers:
            raise ConfigError(
                f"the engine recorded {chosen_PW.shape[1]} experts for a token, and the model has {routers} routers",
                "engine and trainer must have the same model",
            )
        self._chosen_PLK = chosen_PW.view(len(chosen_PW), routers, -1)

    def balance(self) -> torch.Tensor:
        """Return the load-balancing loss of the last pass (Switch Transformer, as transformers computes it): 1 if all
        experts get equal shares."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        first: Any = self._routers[0]
        logits = tuple(logits_PE for logits_PE in self._logits if logits_PE is not None)
        made: torch.Tensor = load_balancing_loss_func(logits, first.num_experts, first.top_k)
        return made

    def _watch(
        self, number: int, router: nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_PE, weight_PK, own_PK = output
        self._logits[number] = logits_PE
        if self._chosen_PLK is None:
            return output
        weigh = self._weigh[number] or _rule(router, logits_PE, weight_PK, own_PK)
        self._weigh[number] = weigh
        chosen_PK = self._chosen_PLK[:, number]
        index_PK = torch.where(chosen_PK == UNKNOWN, own_PK, chosen_PK)
        return logits_PE, weigh(logits_PE, index_PK).to(weight_PK.dtype), index_PK


def _rule(router: nn.Module, logits_PE: torch.Tensor, weight_PK: torch.Tensor, own_PK: torch.Tensor) -> Weigh:
    """Return how this router weighs the experts that it has chosen; ConfigError if it is neither of two known ways."""
    for rule in (_among_chosen, _among_all):
        apart = (rule(logits_PE, own_PK) - weight_PK.float()).abs().max() / weight_PK.float().abs().max()
        if apart <= _CLOSE:
            return rule
    raise ConfigError(
        f"{type(router).__name__} weighs experts in a way that the trainer does not know",
        "remove trainer.replay_routing",
    )


def _among_chosen(logits_PE: torch.Tensor, index_PK: torch.Tensor) -> torch.Tensor:
    """Weights that add up to 1 for each token."""
    return logits_PE.float().gather(1, index_PK).softmax(-1)


def _among_all(logits_PE: torch.Tensor, index_PK: torch.Tensor) -> torch.Tensor:
    """The probabilities of the chosen experts among all of them."""
    return logits_PE.float().softmax(-1).gather(1, index_PK)


_KNOWN: WeakKeyDictionary[nn.Module, Routing] = WeakKeyDictionary()
