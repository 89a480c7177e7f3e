"""Connects transformers models to our attention, through their registry of attention functions.

A micro-batch's layout travels as the keyword argument `packed` through the model's own calls, so a layer that is
recomputed in the backward pass finds it again. A call without it gets torch's attention with the model's mask, so other
users of the model see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rillflow.errors import ConfigError
from rillflow.trainer.attention.spans import Heads

NAME = "rillflow"
# Options of a layer that we do not compute. A model that uses one would be trained wrongly.
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")

Attention = Callable[[Heads, float], torch.Tensor]


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
