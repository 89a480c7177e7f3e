"""How a model reads packed rows. Every backend gives the same hidden states and gradients, up to rounding.

Packed attention reaches a transformers model through its registry of attention functions. A micro-batch's layout
travels as the keyword argument `packed` through the model's own calls, so a layer that is recomputed in the backward
pass finds it again. A call without it gets the library's attention with the model's mask, so other users of the model
see no difference. The backend `padded` serves any causal model: rows of similar length, padded to the longest of them.

Each layer names its own options: a sliding window, a cap of its scores, attention sinks. They are computed as it names
them. A model whose layers do not name all that their attention does cannot be packed.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from rillflow.errors import ConfigError
from rillflow.trainer.attention.forest import PATHS, Packed, flex, joined, packed
from rillflow.trainer.attention.kernels import Heads, Options
from rillflow.trainer.packing import Layout, runs
from rillflow.trainer.parallel.context import Context
from rillflow.trainer.parallel.sharding import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.trainer.batches import Ints

log = logging.getLogger(__name__)

# The second is for models that the library computes without torch's attention, because that lacks something.
NAME, NAME_EAGER = "rillflow", "rillflow_eager"
_KINDS = {"full_attention", "sliding_attention"}
# Options of a layer that we do not compute. A model that uses one would be trained wrongly.
_REFUSED = ("position_bias",)


def hidden_states(
    model: PreTrainedModel, layout: Layout, backend: str, context: Context = Context()
) -> torch.Tensor:  # fmt: skip
    """Return `hidden_PD`, the last hidden states of the model without its head, after its final norm; with a context
    those of this rank's tokens."""
    body = decoder(model)
    if backend == "padded":
        return _padded_hidden_states(body, layout)
    name = NAME if body._supports_sdpa else NAME_EAGER
    if body.config._attn_implementation != name:
        body.set_attn_implementation(name)
    layout = context.padded(layout)
    tokens_P = context.own(layout.tokens_P)
    read: torch.Tensor = body(
        input_ids=tokens_P[None],
        position_ids=context.own(layout.position_P)[None],
        # transformers accepts a mask of four dimensions as it is; no layer reads it.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens_P.device),
        use_cache=False,
        packed=context.exchanging(_packed(layout, backend, body.config)),
    ).last_hidden_state
    return read[0]


def _packed(layout: Layout, backend: str, config: Any) -> Packed:
    windows = windows_of(config)
    if backend == "flex":
        return packed(layout, windows, partial(flex, layout))
    kernel = {"varlen": "flash", "cudnn": "cudnn"}.get(backend, PATHS)
    if kernel == PATHS and layout.tokens_P.device.type != "cpu" and windows == {None} and not _capped(config):
        kernel = "plain"
    return packed(layout, windows, partial(joined, layout, kernel))


def windows_of(config: Any) -> Set[int | None]:
    """Return the sliding windows of a model's layers; None is that of layers with full attention."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return {window if kind == "sliding_attention" else None for kind in kinds or ["sliding_attention"]}


def _capped(config: Any) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None


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
    dtype = dtype or model.dtype
    reason = _unpackable(body)
    if wanted == "auto":
        wanted, why = ("padded", reason) if reason else _fastest(body, device, dtype, trees)
        if why:
            log.info("attention is %s: %s", wanted, why)
    elif wanted in {"varlen", "cudnn", "flex"} and device.type != "cuda":
        reason = reason or f"{wanted} attention needs a GPU"
    elif wanted in {"varlen", "cudnn"}:
        reason = reason or _no_flash(body, dtype) or _beyond_flash(body, trees)
    if trees and wanted == "padded":
        raise ConfigError(
            f"padded attention cannot read trees{': ' + reason if reason else ''}", "set trainer.trees: false"
        )
    if context.size > 1 and wanted == "padded":
        raise ConfigError(
            f"ranks cannot share padded rows{': ' + reason if reason else ''}",
            "set trainer.ranks: 1, or sharding: fsdp",
        )
    context.check(model)
    if reason and wanted != "padded":
        raise ConfigError(f"trainer.attention cannot be {wanted}: {reason}", "set trainer.attention: auto")
    return wanted


def _fastest(body: Any, device: torch.device, dtype: torch.dtype, trees: bool) -> tuple[str, str]:
    """Return the fastest backend for a model that can be packed, and why it is not the usual one."""
    if device.type != "cuda":
        return "sdpa", ""
    no_flash, beyond = _no_flash(body, dtype), _beyond_flash(body, trees)
    if not no_flash and not beyond:
        return "varlen", ""
    special = windows_of(body.config) != {None} or _capped(body.config)
    return ("flex", beyond or no_flash) if special else ("sdpa", "")


def _unpackable(body: Any) -> str:
    """Return why this model cannot read packed rows; empty if it can."""
    config, layers = body.config, decoder_layers(body)
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    named = _sources(layers)
    slides = windows_of(config) != {None}
    reasons = {
        "does not take its attention from outside": not getattr(body, "_supports_attention_backend", False),
        "does not pass keyword arguments to its attention": any(map(_drops_keywords, layers)),
        f"has layers of {', '.join(other)}": bool(other),
        "carries a state from token to token": getattr(body, "_is_stateful", False),
        "caps its attention scores without naming it": _capped(config) and "softcap=" not in named,
        "has a sliding window that its layers do not name": slides and "sliding_window=" not in named,
        "attends in both directions": not all(getattr(part, "is_causal", True) for part in body.modules()),
    }
    return next((f"{type(body).__name__} {reason}" for reason, holds in reasons.items() if holds), "")


def _sources(layers: list[torch.nn.Module]) -> str:
    """Return the source of how the parts of the layers compute: what an attention names is seen there."""
    forwards = {inspect.unwrap(type(part).forward) for layer in layers for part in layer.modules()}
    own = {inspect.unwrap(type(layer).forward).__module__ for layer in layers}
    return "\n".join(inspect.getsource(forward) for forward in forwards if forward.__module__ in own)


def _drops_keywords(layer: torch.nn.Module) -> bool:
    """Return whether a layer takes keyword arguments without passing them on: the layout would not reach attention."""
    return len(re.findall(r"\*\*\w+", inspect.getsource(inspect.unwrap(type(layer).forward)))) < 2


def _beyond_flash(body: Any, trees: bool) -> str:
    """Return what the model needs that flash attention does not have; empty if it has all."""
    if _capped(body.config):
        return f"{type(body).__name__} caps its attention scores, and flash attention does not"
    if trees and windows_of(body.config) != {None}:
        return f"{type(body).__name__} has a sliding window, which flash attention does not have in trees"
    return ""


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
    packed: Packed | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend; `query`, `key`, `value` are [1, heads, tokens, head size], the result is [1, tokens, heads, head
    size]."""
    if packed is None and attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
        raise ConfigError(
            f"the layers of {type(module).__name__} do not pass the layout of packed rows to it",
            "set trainer.attention: padded",
        )
    if packed is None:
        theirs: tuple[torch.Tensor, torch.Tensor | None] = _library(module)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return theirs
    wanted = asked(module, dropout, options)
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    heads = Heads(*(part.transpose(1, 2)[0].to(dtype) for part in (query, key, value)))
    return packed(heads, scaling if scaling is not None else query.shape[-1] ** -0.5, wanted)[None], None


def _library(module: Any) -> Any:
    """Return the attention that the library has for a module: torch's, or the one of the model's own file."""
    if module.config._attn_implementation == NAME:
        return sdpa_attention_forward
    return vars(inspect.getmodule(inspect.unwrap(type(module).forward)))["eager_attention_forward"]


def asked(module: torch.nn.Module, dropout: float, options: Mapping[str, Any]) -> Options:
    """Return the options of a layer; raise ConfigError if there is one that we do not compute."""
    refused = [name for name in _REFUSED if options.get(name) is not None]
    if dropout:
        refused.append("dropout")
    if refused:
        raise ConfigError(
            f"{type(module).__name__} uses {', '.join(refused)}, which packed attention does not have",
            "set trainer.attention: padded",
        )
    return Options(options.get("sliding_window"), options.get("softcap"), options.get("s_aux"))


for _name, _mask in ((NAME, sdpa_mask), (NAME_EAGER, eager_mask)):
    AttentionInterface.register(_name, attend)
    AttentionMaskInterface.register(_name, _mask)


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
