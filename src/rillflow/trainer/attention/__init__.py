"""How a model reads packed rows. Every backend gives the same hidden states and gradients, up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rillflow.errors import ConfigError
from rillflow.trainer.attention import padded
from rillflow.trainer.attention.flex import flex
from rillflow.trainer.attention.interface import NAME
from rillflow.trainer.attention.joined import joined
from rillflow.trainer.packing import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["choose", "decoder", "hidden_states"]


def hidden_states(model: PreTrainedModel, layout: Layout, backend: str) -> torch.Tensor:
    """Return `hidden_PD`, the last hidden states of the model without its head, after its final norm."""
    body = decoder(model)
    if backend == "padded":
        return padded.hidden_states(body, layout)
    if body.config._attn_implementation != NAME:
        body.set_attn_implementation(NAME)
    read: torch.Tensor = body(
        input_ids=layout.tokens_P[None],
        position_ids=layout.position_P[None],
        # transformers accepts a mask of four dimensions as it is; no layer reads it.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.tokens_P.device),
        use_cache=False,
        packed=_packed(layout, backend),
    ).last_hidden_state
    return read[0]


def _packed(layout: Layout, backend: str) -> Any:
    if backend == "flex":
        return flex(layout)
    if backend == "varlen":
        return joined(layout, "flash")
    return joined(layout, "fused" if layout.tokens_P.device.type == "cpu" else "plain")


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
) -> str:
    """Return the backend for a model that computes in `dtype`: the `wanted` one, or with "auto" the fastest
    possible."""
    body = decoder(model)
    reason = _unpackable(body)
    if wanted == "auto":
        flash = device.type == "cuda" and not _no_flash(body, dtype or model.dtype)
        wanted = "padded" if reason else "varlen" if flash else "sdpa"
    elif wanted in {"varlen", "flex"} and device.type != "cuda":
        reason = reason or f"{wanted} attention needs a GPU"
    elif wanted == "varlen":
        reason = reason or _no_flash(body, dtype or model.dtype)
    if trees and wanted == "padded":
        raise ConfigError(
            f"padded attention cannot read trees{': ' + reason if reason else ''}", "set trainer.trees: false"
        )
    if reason and wanted != "padded":
        raise ConfigError(f"trainer.attention cannot be {wanted}: {reason}", "set trainer.attention: auto")
    return wanted


def _unpackable(body: Any) -> str:
    """Return why this model cannot read packed rows; empty if it can."""
    config, name = body.config, type(body).__name__
    if not getattr(body, "_supports_attention_backend", False):
        return f"{name} does not take its attention from outside"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        return f"{name} has layers of {', '.join(other)}"
    if getattr(body, "_is_stateful", False):
        return f"{name} carries a state from token to token"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{name} caps its attention scores"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        return f"{name} has a sliding window"
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
