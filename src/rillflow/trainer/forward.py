"""Scores of the trained tokens under the current weights: log-probs of a policy, values of a scalar model.

Log-probs are at the temperature that their tokens were sampled with, and equal those of a full `log_softmax`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from rillflow import kernels
from rillflow.config import TrainerConfig
from rillflow.engine.embedded.forward import BLOCK, logprob, read_block
from rillflow.errors import ConfigError
from rillflow.trainer.attention import choose, hidden_states
from rillflow.trainer.experts import routing_of, set_choices
from rillflow.trainer.lm_head import PolicyHead
from rillflow.trainer.lora import adapters_off
from rillflow.trainer.packing import MicroBatch
from rillflow.trainer.parallel.sharding import entered
from rillflow.weights.models import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PolicyForward:
    """Calls a causal language model; without `adapters`, its LoRA adapters are off. With `exact`, log-probs have
    exactly the bits of an embedded engine in its exact mode, which is slower."""

    def __init__(
        self, model: PreTrainedModel, config: TrainerConfig, *, adapters: bool = True, exact: bool = False
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._replays = config.replay_routing
        self._balances = config.router_loss > 0
        self.balance: torch.Tensor | None = None  # the balance loss of the last call, if it has a gradient
        self._run: Callable[[MicroBatch], tuple[torch.Tensor, ...]]
        if exact:
            self._run = entered(model, partial(exact_scores, model))
            return
        self._backend = _backend(model, config)
        if self._replays or self._balances:
            self._routing = routing_of(model, packed=self._backend != "padded")
        self._head = entered(model, PolicyHead)(model, config)
        self._run = entered(model, self._scores)

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of the targets, with gradient, and the entropies of their distributions, which have a
        gradient only if the recipe has an entropy bonus."""
        set_choices(self._model, micro.layout.experts_PW if self._replays else None)
        with self._as_asked():
            score_T, entropy_T, *balance = self._run(micro)
        self.balance = balance[0] if balance else None
        return score_T, entropy_T

    def _scores(self, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
        hidden_PD = hidden_states(self._model, micro.layout, self._backend)
        hidden_TD = hidden_PD.index_select(0, micro.select_T)
        scores = self._head(hidden_TD, micro.target_T, micro.columns["temperature_T"])
        return (*scores, self._routing.balance()) if self._balances and torch.is_grad_enabled() else scores

    def _as_asked(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters else adapters_off(self._model)


class ScalarForward:
    """Calls a model whose head `score` gives one number for each token."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        head = getattr(model, "score", None)
        if not isinstance(head, torch.nn.Linear):
            raise ConfigError(
                f"{type(model).__name__} has no head `score`", "use a decoder-only model for critics and rewards"
            )
        self._model = model
        self._head = head
        self._backend = _backend(model, config)
        self._run = entered(model, self._values)

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        """Return a float32 value for each trained token, with gradient."""
        return self._run(micro)

    def _values(self, micro: MicroBatch) -> torch.Tensor:
        hidden_PD = hidden_states(self._model, micro.layout, self._backend)
        values_T1: torch.Tensor = self._head(hidden_PD.index_select(0, micro.select_T))
        return values_T1.sum(-1).float()  # a sum over one value: a view would need care under FSDP


def _backend(model: PreTrainedModel, config: TrainerConfig) -> str:
    device = next(model.parameters()).device
    dtype = DTYPES[config.dtype]
    backend = choose(model, config.attention, device, dtype=dtype, trees=config.trees)
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
