"""How a model reads packed rows. Every backend gives the same hidden states and gradients, up to rounding.

Packed attention reaches a transformers model through its registry of attention functions. A micro-batch's layout
travels as the keyword argument `packed` through the model's own calls, so a layer that is recomputed in the backward
pass finds it again. A call without it gets torch's attention with the model's mask, so other users of the model see no
difference. The backend `padded` serves any causal model: rows of similar length, padded to the longest of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rillflow.errors import ConfigError
from rillflow.trainer.attention.forest import PATHS, flex, joined
from rillflow.trainer.attention.kernels import Heads
from rillflow.trainer.packing import Layout, runs
from rillflow.trainer.parallel.context import Context
from rillflow.trainer.parallel.sharding import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.trainer.batches import Ints

NAME = "rillflow"
# Options of a layer that we do not compute. A model that uses one would be trained wrongly.
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")

Attention = Callable[[Heads, float], torch.Tensor]


def hidden_states(
    model: PreTrainedModel, layout: Layout, backend: str, context: Context = Context()
) -> torch.Tensor:  # fmt: skip
    """Return `hidden_PD`, the last hidden states of the model without its head, after its final norm; with a context
    those of this rank's tokens."""
    body = decoder(model)
    if backend == "padded":
        return _padded_hidden_states(body, layout)
    if body.config._attn_implementation != NAME:
        body.set_attn_implementation(NAME)
    layout = context.padded(layout)
    tokens_P = context.own(layout.tokens_P)
    read: torch.Tensor = body(
        input_ids=tokens_P[None],
        position_ids=context.own(layout.position_P)[None],
        # transformers accepts a mask of four dimensions as it is; no layer reads it.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens_P.device),
        use_cache=False,
        packed=context.exchanging(_packed(layout, backend)),
    ).last_hidden_state
    return read[0]


def _packed(layout: Layout, backend: str) -> Any:
    if backend == "flex":
        return flex(layout)
    if backend in {"varlen", "cudnn"}:
        return joined(layout, "flash" if backend == "varlen" else backend)
    return joined(layout, PATHS if layout.tokens_P.device.type == "cpu" else "plain")


def decoder(model: PreTrainedModel) -> Any:
    """Return the model without its head, the only part that `hidden_states` calls."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return inner.base_model


def choose(
    model: PreTrainedModel,
    wanted: str,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    trees: bool = False,
    context: Context = Context(),
) -> str:
    """Return the backend for a model that computes in `dtype`: the `wanted` one, or with "auto" the fastest
    possible."""
    body = decoder(model)
    reason = _unpackable(body)
    if wanted == "auto":
        flash = device.type == "cuda" and not _no_flash(body, dtype or model.dtype)
        wanted = "padded" if reason else "varlen" if flash else "sdpa"
    elif wanted in {"varlen", "cudnn", "flex"} and device.type != "cuda":
        reason = reason or f"{wanted} attention needs a GPU"
    elif wanted in {"varlen", "cudnn"}:
        reason = reason or _no_flash(body, dtype or model.dtype)
    if trees and wanted == "padded":
        raise ConfigError(
            f"padded attention cannot read trees{': ' + reason if reason else ''}", "set trainer.trees: false"
        )
    if context.size > 1 and wanted == "padded":
        raise ConfigError(
            f"ranks cannot share padded rows{': ' + reason if reason else ''}", "set trainer.context_ranks: 1"
        )
    context.check(model)
    if reason and wanted != "padded":
        raise ConfigError(f"trainer.attention cannot be {wanted}: {reason}", "set trainer.attention: auto")
    return wanted


def _unpackable(body: Any) -> str:
    """Return why this model cannot read packed rows; empty if it can."""
    config = body.config
    kinds = getattr(config, "layer_types", None)
    other = sorted(set(kinds or ()) - {"full_attention"})
    reasons = {
        "does not take its attention from outside": not getattr(body, "_supports_attention_backend", False),
        "does not pass keyword arguments to its attention": any(map(_drops_keywords, decoder_layers(body))),
        f"has layers of {', '.join(other)}": bool(other),
        "carries a state from token to token": getattr(body, "_is_stateful", False),
        "caps its attention scores": getattr(config, "attn_logit_softcapping", None),
        "has a sliding window": kinds is None and getattr(config, "sliding_window", None),
    }
    return next((f"{type(body).__name__} {reason}" for reason, holds in reasons.items() if holds), "")


def _drops_keywords(layer: torch.nn.Module) -> bool:
    """Return whether a layer takes keyword arguments without passing them on: the layout would not reach attention."""
    return len(re.findall(r"\*\*\w+", inspect.getsource(inspect.unwrap(type(layer).forward)))) < 2


def _no_flash(body: Any, dtype: torch.dtype) -> str:
    """Return why flash attention cannot run; empty if it can."""
    if dtype not in {torch.bfloat16, torch.float16}:
        return f"flash attention computes in bf16, not in {dtype}"
    size = _head_size(body)
    return "" if size % 8 == 0 and size <= 256 else f"flash attention has no heads of size {size}"


def _head_size(body: Any) -> int:
    config = body.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


# ---------------------------------------------------------------- transformers' interface


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: Attention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; `query`, `key`, `value` are [1, heads, tokens, head size], the result is [1, tokens, heads, head
    size]."""
    if packed is None and attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
        raise ConfigError(
            f"the layers of {type(module).__name__} do not pass the layout of packed rows to it",
            "set trainer.attention: padded",
        )
    if packed is None:
        shown: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return shown
    check(module, dropout, options)
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    heads = Heads(*(part.transpose(1, 2)[0].to(dtype) for part in (query, key, value)))
    return packed(heads, scaling if scaling is not None else query.shape[-1] ** -0.5)[None], None


def check(module: torch.nn.Module, dropout: float, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a layer uses an option that we do not compute."""
    asked = [name for name in _REFUSED if options.get(name) is not None]
    if dropout:
        asked.append("dropout")
    if asked:
        raise ConfigError(
            f"{type(module).__name__} uses {', '.join(asked)}, which packed attention does not have",
            "set trainer.attention: padded",
        )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


# ---------------------------------------------------------------- padded rows

# Rows shorter than this share of the longest begin a new pass, once the current one has enough tokens.
_LIKE = 0.85
_ENOUGH = 1024


def _padded_hidden_states(decoder: torch.nn.Module, layout: Layout) -> torch.Tensor:
    if (layout.parent_S >= 0).any():
        raise ConfigError("padded attention cannot read trees", "set trainer.trees: false, or another attention")
    hidden, places = [], []
    for index in _alike(layout.length_S):
        length_B = layout.length_S[index]
        place_R = runs(layout.start_S[index], length_B)
        into_R = runs(np.arange(len(index)) * length_B.max(), length_B)
        hidden.append(_read(decoder, layout, place_R, into_R, (len(index), int(length_B.max()))))
        places.append(place_R)
    back_P = np.argsort(np.concatenate(places), kind="stable")
    return torch.cat(hidden).index_select(0, torch.from_numpy(back_P).to(layout.tokens_P.device))


def _read(
    decoder: torch.nn.Module, layout: Layout, place_R: Ints, into_R: Ints, shape: tuple[int, int]
) -> torch.Tensor:
    device = layout.tokens_P.device
    into = torch.from_numpy(into_R).to(device)
    tokens = layout.tokens_P.new_zeros(shape[0] * shape[1])
    tokens[into] = layout.tokens_P[torch.from_numpy(place_R).to(device)]
    read: torch.Tensor = decoder(input_ids=tokens.view(shape), use_cache=False).last_hidden_state
    return read.flatten(0, 1).index_select(0, into)


def _alike(length_S: Ints) -> Iterator[Ints]:
    """Yield segment numbers in parts of similar length, longest first."""
    order = np.argsort(-length_S, kind="stable")
    while len(order):
        longest = length_S[order[0]]
        fit = int(np.searchsorted(-length_S[order], -_LIKE * longest, side="right"))
        count = max(fit, -(-_ENOUGH // int(longest)))
        yield order[:count]
        order = order[count:]
