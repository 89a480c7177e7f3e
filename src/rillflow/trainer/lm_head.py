"""Log-probs and entropies from hidden states, without a full-vocabulary fp32 tensor.

The head runs in pieces of some tokens. Forward keeps two numbers for each token, the log of the partition sum and the
entropy; backward computes the piece's logits again. Without `recompute`, forward keeps the probabilities instead if
they are in half precision (their gradients are rounded too) or few, and backward needs no logits. The keys of a model's
config say how it changes its logits (bias, scaling, soft cap). At construction the result is compared with the model's
own logits; a model that does something else runs its own head, piece by piece, recomputed in backward.

Axes: T trained tokens, V the vocabulary, D the hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from rillflow.trainer.attention import decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.config import TrainerConfig

    Scores = tuple[torch.Tensor, torch.Tensor]

# Most bytes of probabilities in full precision that are kept.
_FEW = 1 << 25
# The tolerated distance of two computations of the same logits, relative to the largest logit.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """The change of raw logits before the softmax: times `scale`, then bounded softly by `cap`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw_TV: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        logits_TV = raw_TV if bias_V is None else raw_TV + bias_V
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        return logits_TV if self.cap is None else self.cap * torch.tanh(logits_TV / self.cap)


def shape_of(model: PreTrainedModel) -> Shape:
    """Return the shape from the keys of the model's config."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) * (getattr(config, "lm_head_multiplier", None) or 1.0)
    return Shape(
        scale=float(scale) / (getattr(config, "logits_scaling", None) or 1.0),
        cap=getattr(config, "final_logit_softcapping", None),
    )


# ------------------------------------------------------------ one piece


class _Piece(NamedTuple):
    """Some tokens with the raw logits of their hidden states."""

    raw_TV: torch.Tensor
    bias_V: torch.Tensor | None
    target_T: torch.Tensor
    temperature_T: torch.Tensor


class _Stats(NamedTuple):
    """For each token the log-prob of the target, the log of the partition sum and the entropy."""

    logprob_T: torch.Tensor
    total_T: torch.Tensor
    entropy_T: torch.Tensor


class _Grad(NamedTuple):
    """The incoming gradients for some tokens: of their log-probs, and of their entropies if those have one."""

    logprob_T: torch.Tensor
    entropy_T: torch.Tensor | None


def _stats(piece: _Piece, shape: Shape, keep: torch.dtype | None = None) -> tuple[_Stats, torch.Tensor | None]:
    """Return the statistics, and the probabilities if a dtype to `keep` them in is given."""
    logits_TV = shape(piece.raw_TV, piece.bias_V) * piece.temperature_T.reciprocal()[:, None]
    highest_T = logits_TV.amax(-1)
    share_TV = (logits_TV - highest_T[:, None]).exp_()
    sum_T = share_TV.sum(-1)
    total_T = highest_T + sum_T.log()
    entropy_T = total_T - (share_TV * logits_TV).sum(-1) / sum_T
    logprob_T = logits_TV.gather(-1, piece.target_T[:, None]).squeeze(-1) - total_T
    kept_TV = None if keep is None else (share_TV * sum_T.reciprocal()[:, None]).to(keep)
    return _Stats(logprob_T, total_T, entropy_T), kept_TV


def _grads(piece: _Piece, shape: Shape, stats: _Stats, grad: _Grad, dtype: torch.dtype) -> torch.Tensor:
    """The gradient with respect to the raw logits, in `dtype`."""
    shaped_TV = shape(piece.raw_TV, piece.bias_V)
    log_TV = torch.addcmul(-stats.total_T[:, None], shaped_TV, piece.temperature_T.reciprocal()[:, None])
    # The gradient is minus the probability for every logit, plus one for the target.
    grad_TV = (log_TV.exp() * -(_pull(log_TV, stats, grad) * _factor(log_TV, piece, shape, stats))).to(dtype)
    own_T1 = stats.logprob_T[:, None]
    push_T1 = grad.logprob_T[:, None] - own_T1.exp() * _pull(own_T1, stats, grad)
    at_target_T = (push_T1 * _factor(own_T1, piece, shape, stats))[:, 0].to(dtype)
    grad_TV[torch.arange(len(grad_TV), device=grad_TV.device), piece.target_T] = at_target_T
    return grad_TV


def _scaled(
    share_TV: torch.Tensor, stats: _Stats, grad: _Grad, target_T: torch.Tensor, factor_T: torch.Tensor
) -> torch.Tensor:
    """Return what `_grads` does, from the probabilities, if only log-probs have gradients and logits are not
    capped."""
    pull_T = grad.logprob_T * factor_T
    grad_TV = (share_TV * -pull_T[:, None]).to(share_TV.dtype)
    at_target_T = (pull_T * -torch.expm1(stats.logprob_T)).to(share_TV.dtype)
    grad_TV[torch.arange(len(grad_TV), device=grad_TV.device), target_T] = at_target_T
    return grad_TV


def _pull(log_TV: torch.Tensor, stats: _Stats, grad: _Grad) -> torch.Tensor:
    """Return the factor of the probabilities: one for all logits of a token, unless its entropy has a gradient."""
    if grad.entropy_T is None:
        return grad.logprob_T[:, None]
    return grad.logprob_T[:, None] + grad.entropy_T[:, None] * (log_TV + stats.entropy_T[:, None])


def _factor(log_TV: torch.Tensor, piece: _Piece, shape: Shape, stats: _Stats) -> torch.Tensor:
    """Return the derivative of the softmax's inputs by the raw logits, at these log-probs."""
    scale_T1 = (shape.scale / piece.temperature_T)[:, None]
    if shape.cap is None:
        return scale_T1
    shaped_TV = (log_TV + stats.total_T[:, None]) * piece.temperature_T[:, None]
    return scale_T1 * (1 - (shaped_TV / shape.cap).square())


_FUNCTIONS: tuple[Callable[..., Any], ...] = (_stats, _grads, _scaled)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def _product(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix product in `dtype`; on a GPU without rounding to the factors' dtype in between."""
    if one.is_cuda and one.dtype is not dtype:
        return torch.mm(one, other, out_dtype=dtype)
    return (one @ other).to(dtype)


# ------------------------------------------------------------ all pieces


@dataclass(frozen=True)
class _How:
    shape: Shape
    piece: int
    entropy_grad: bool
    keep: bool
    stats: Callable[..., tuple[_Stats, torch.Tensor | None]]
    grads: Callable[..., torch.Tensor]
    scaled: Callable[..., torch.Tensor]


class _Pieces(torch.autograd.Function):
    """Saves the hidden states, the weight and vectors over tokens; probabilities in half precision; never logits."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them by place)
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_T: torch.Tensor,
        temperature_T: torch.Tensor,
        how: _How,
    ) -> Scores:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        parts, kept = [], []
        for at in _pieces(len(target_T), how.piece):
            piece = _Piece(_product(hidden_TD[at], weight_VD.T, wide), bias_V, target_T[at], temperature_T[at])
            found, share_TV = how.stats(piece, how.shape, hidden_TD.dtype if how.keep else None)
            parts.append(found)
            if share_TV is not None:
                kept.append(share_TV)
        stats = _Stats(*(torch.cat(column) for column in zip(*parts, strict=True)))
        ctx.how = how
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T, temperature_T, *stats, *kept)
        if not how.entropy_grad:
            ctx.mark_non_differentiable(stats.entropy_T)
        return stats.logprob_T, stats.entropy_T

    @staticmethod
    def backward(ctx: Any, logprob_grad_T: torch.Tensor, entropy_grad_T: torch.Tensor) -> tuple[Any, ...]:
        hidden_TD, weight_VD, bias_V, target_T, temperature_T, *saved = ctx.saved_tensors
        how: _How = ctx.how
        stats, kept = saved[: len(_Stats._fields)], saved[len(_Stats._fields) :]
        wide = stats[0].dtype
        hidden_grad_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        bias_grad_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        for number, at in enumerate(_pieces(len(target_T), how.piece)):
            of_piece = _Stats(*(column[at] for column in stats))
            grad = _Grad(logprob_grad_T[at], entropy_grad_T[at] if how.entropy_grad else None)
            if how.keep:
                factor_T = how.shape.scale / temperature_T[at]
                grad_TV = how.scaled(kept[number], of_piece, grad, target_T[at], factor_T)
            else:
                raw_TV = _product(hidden_TD[at], weight_VD.T, wide)
                piece = _Piece(raw_TV, bias_V, target_T[at], temperature_T[at])
                grad_TV = how.grads(piece, how.shape, of_piece, grad, hidden_TD.dtype)
            if bias_grad_V is not None:
                bias_grad_V += grad_TV.sum(0, dtype=wide)
            if hidden_grad_TD is not None:
                hidden_grad_TD[at] = grad_TV @ weight_VD
            if weight_grad_VD is not None:
                weight_grad_VD += _product(grad_TV.T, hidden_TD[at], wide)
        return (
            hidden_grad_TD,
            None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype),
            None if bias_grad_V is None or bias_V is None else bias_grad_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, max(count, 1), size))


# ------------------------------------------------------------ the head of a model


class PolicyHead:
    """The head of a causal language model: from hidden states to log-probs of the targets and entropies.

    The entropy has a gradient only if the recipe has an entropy bonus. The head of a sharded model must be made and
    called while its weights are gathered.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        self._model = model
        self._head = model.get_output_embeddings()
        self._how = _How(
            shape_of(model),
            config.head_tokens,
            config.entropy > 0,
            False,
            *map(_compiled if config.compile else _as_it_is, _FUNCTIONS),
        )
        self._keeps = not config.recompute and config.entropy == 0 and self._how.shape.cap is None
        self._known = type(self._head) is torch.nn.Linear and self._agrees()

    def __call__(self, hidden_TD: torch.Tensor, target_T: torch.Tensor, temperature_T: torch.Tensor) -> Scores:
        if self._known:
            weight_VD, bias_V = self._head.weight, self._head.bias
            few = len(target_T) * weight_VD.shape[0] * hidden_TD.dtype.itemsize <= _FEW
            keep = self._keeps and torch.is_grad_enabled() and (hidden_TD.dtype.itemsize < 4 or few)
            how = replace(self._how, keep=keep)
            scores: Scores = _Pieces.apply(hidden_TD, weight_VD, bias_V, target_T, temperature_T, how)  # type: ignore[no-untyped-call]
            return scores
        parts = [
            checkpoint(self._own, hidden_TD[at], target_T[at], temperature_T[at], use_reentrant=False)
            for at in _pieces(len(target_T), self._how.piece)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _own(self, hidden_TD: torch.Tensor, target_T: torch.Tensor, temperature_T: torch.Tensor) -> Scores:
        """Compute a piece by the model's own head."""
        logits_TV = own_logits(self._model, hidden_TD)
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        (logprob_T, _, entropy_T), _ = _stats(_Piece(logits_TV.to(wide), None, target_T, temperature_T), Shape())
        return logprob_T, entropy_T if self._how.entropy_grad else entropy_T.detach()

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Return whether the model's logits follow the keys of its config, for small and for large hidden states."""
        weight_VD = self._head.weight
        drawn_TD = torch.randn(4, weight_VD.shape[1], generator=torch.Generator().manual_seed(0))
        drawn_TD = (drawn_TD * torch.tensor([[0.1], [1.0], [10.0], [100.0]])).to(weight_VD.device, weight_VD.dtype)
        ours_TV = self._how.shape(drawn_TD @ weight_VD.T, self._head.bias)
        own_TV = own_logits(self._model, drawn_TD)
        apart_T = (ours_TV - own_TV).abs().amax(-1) / own_TV.abs().amax(-1).clamp(min=1e-6)
        return bool((apart_T < _ROUNDING[weight_VD.dtype]).all())


def own_logits(model: PreTrainedModel, hidden_TD: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits of these last hidden states."""
    nothing_1T = torch.zeros(1, len(hidden_TD), dtype=torch.long, device=hidden_TD.device)
    with _standing_in(decoder(model), hidden_TD[None]):
        # The class's own forward: on a sharded model the hooks of a call already run.
        logits_1TV: torch.Tensor = type(model).forward(model, input_ids=nothing_1T, use_cache=False).logits
    return logits_1TV[0]


class _HiddenOnly:
    """A decoder's output with hidden states, and None for everything else that this kind of decoder may return: caches,
    states, router logits."""

    def __init__(self, hidden_1TD: torch.Tensor) -> None:
        self.last_hidden_state = hidden_1TD

    def __getitem__(self, at: int) -> torch.Tensor:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@contextmanager
def _standing_in(body: torch.nn.Module, hidden_1TD: torch.Tensor) -> Iterator[None]:
    """Let the decoder return these hidden states meanwhile, without computing."""
    before = body.__dict__.get("forward")
    answer = _HiddenOnly(hidden_1TD)
    body.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        del body.forward
        if before is not None:
            body.forward = before
