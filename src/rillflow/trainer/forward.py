"""Scores of the trained tokens under the current weights: log-probs of a policy, values of a scalar model.

Log-probs are at the temperature that their tokens were sampled with, and equal those of a full `log_softmax`.

`Routing` is for mixtures of experts: the routers' balance loss, and the replay of an engine's choices. A router scores
the experts for each token and chooses a few. The engine that sampled a token may have chosen others than the trainer
does, because their roundings differ; then their log-probs differ by more than rounding. With recorded choices
(`Layout.experts_PW`) the routers take those, and weigh them by their own scores, with gradient. Routers are watched by
hooks. They return the scores of all experts, the weights and the numbers of the chosen ones. A model without such
routers has no balance loss and no replay.

Axes of experts: P packed tokens, L routers, K experts that a token is sent to, W = L K, E all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache

from rillflow import kernels
from rillflow.config import TrainerConfig
from rillflow.engine.embedded.forward import BLOCK, logprob, read_block
from rillflow.engine.experts import routers_of
from rillflow.errors import ConfigError
from rillflow.trainer.attention import choose, hidden_states
from rillflow.trainer.lm_head import PolicyHead
from rillflow.trainer.lora import adapters_off
from rillflow.trainer.packing import MicroBatch
from rillflow.trainer.parallel.context import Context
from rillflow.trainer.parallel.sharding import entered
from rillflow.weights.models import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

UNKNOWN = -1  # in place of an expert that was not recorded
_CLOSE = 1e-2  # relative distance of two computations of the same weights, at the precision of bf16


class PolicyForward:
    """Calls a causal language model; without `adapters`, its LoRA adapters are off. With `exact`, log-probs have
    exactly the bits of an embedded engine in its exact mode, which is slower. With a `context` the ranks of a team call
    it together, with the same micro-batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        adapters: bool = True,
        exact: bool = False,
        context: Context = Context(),
    ) -> None:
        self._model = model
        self._context = context
        self._adapters = adapters
        self._replays = config.replay_routing
        self._balances = config.router_loss > 0
        self.balance: torch.Tensor | None = None  # the balance loss of the last call, if it has a gradient
        self._run: Callable[[MicroBatch], tuple[torch.Tensor, ...]]
        if exact:
            self._run = entered(model, partial(exact_scores, model))
            return
        self._backend = _backend(model, config, context)
        if self._replays or self._balances:
            self._routing = routing_of(model, packed=self._backend != "padded")
        self._head = entered(model, PolicyHead)(model, config)
        self._run = entered(model, self._scores)

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of the targets, with gradient, and the entropies of their distributions, which have a
        gradient only if the recipe has an entropy bonus."""
        set_choices(self._model, self._context.experts(micro.layout) if self._replays else None)
        with self._as_asked():
            score_T, entropy_T, *balance = self._run(micro)
        self.balance = balance[0] if balance else None
        return score_T, entropy_T

    def _scores(self, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
        own = self._context.trained(micro)
        hidden_PD = hidden_states(self._model, micro.layout, self._backend, self._context)
        of_own = self._head(hidden_PD.index_select(0, own.select_I), own.target_I, own.temperature_I)
        scores = tuple(map(own.gather, of_own))
        if not (self._balances and torch.is_grad_enabled()):
            return scores
        return *scores, self._routing.balance(partial(self._context.whole, tokens=len(micro.layout.tokens_P)))

    def _as_asked(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters else adapters_off(self._model)


class ScalarForward:
    """Calls a model whose head `score` gives one number for each token; with a `context` as `PolicyForward`."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, *, context: Context = Context()) -> None:
        head = getattr(model, "score", None)
        if not isinstance(head, torch.nn.Linear):
            raise ConfigError(
                f"{type(model).__name__} has no head `score`", "use a decoder-only model for critics and rewards"
            )
        self._model = model
        self._head = head
        self._context = context
        self._backend = _backend(model, config, context)
        self._run = entered(model, self._values)

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        """Return a float32 value for each trained token, with gradient."""
        return self._run(micro)

    def _values(self, micro: MicroBatch) -> torch.Tensor:
        own = self._context.trained(micro)
        hidden_PD = hidden_states(self._model, micro.layout, self._backend, self._context)
        values_I1: torch.Tensor = self._head(hidden_PD.index_select(0, own.select_I))
        return own.gather(values_I1.sum(-1).float())  # a sum over one value: a view would need care under FSDP


def _backend(model: PreTrainedModel, config: TrainerConfig, context: Context) -> str:
    device = next(model.parameters()).device
    dtype = DTYPES[config.dtype]
    backend = choose(model, config.attention, device, dtype=dtype, trees=config.trees, context=context)
    on_cpu = device.type == "cpu" and dtype == torch.float32 and backend != "padded"
    if on_cpu and not config.compile and kernels.enabled("layers"):
        from rillflow.trainer.fused import compile_ahead, fuse

        fuse(model)
        compile_ahead()
    return backend


# ---------------------------------------------------------------- exact mode


def exact_scores(model: PreTrainedModel, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of the targets and the entropies of their distributions, with gradient.

    Each row is read alone, as in the embedded engine's exact mode, so log-probs have exactly the engine's bits. Rows
    must not share segments (no trees), and layers must not be recomputed in backward: their keys and values go from
    block to block.
    """
    layout = micro.layout
    logits = [
        _logits(model, layout.tokens_P[start : start + length])
        for start, length in zip(layout.start_S.tolist(), layout.length_S.tolist(), strict=True)
    ]
    logits_TV = torch.cat(logits).index_select(0, micro.select_T)
    temperature_T = micro.columns["temperature_T"]
    chosen = zip(logits_TV, micro.target_T.tolist(), temperature_T.tolist(), strict=True)
    score_T = torch.stack([logprob(logits_V, target, temperature) for logits_V, target, temperature in chosen])
    log_TV = (logits_TV.float() / temperature_T[:, None]).log_softmax(-1)
    return score_T, -(log_TV.exp() * log_TV).sum(-1)


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits after each token of a row."""
    cache = DynamicCache()
    blocks = [read_block(model, cache, tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)]
    return torch.cat(blocks)[: len(tokens)]


# ---------------------------------------------------------------- mixtures of experts


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

    def balance(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the load-balancing loss of the last pass (Switch Transformer, as transformers computes it): 1 if all
        experts get equal shares. `gather` returns the scores of all packed tokens, given those that this rank has."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        first: Any = self._routers[0]
        logits = tuple(gather(logits_PE) for logits_PE in self._logits if logits_PE is not None)
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


@torch.no_grad()
def _rule(router: nn.Module, logits_PE: torch.Tensor, weight_PK: torch.Tensor, own_PK: torch.Tensor) -> Weigh:
    """Return how this router weighs the experts that it has chosen; ConfigError if it is neither of two known ways.

    Without gradient: a layer that is recomputed in backward must save there what it saved in its forward pass."""
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
