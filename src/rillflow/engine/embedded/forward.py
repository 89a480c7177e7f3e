"""From a batch of new tokens to the logits of each row's last one, through the slots of KV cache.

Two implementations of one function. `LeanForward` runs the Llama family (Llama, Qwen2, Qwen3) with few, large
operators: a small model's time is dispatch, and the library's own forward spends three quarters of it there.
`LibraryForward` calls any other transformers model whose layers have full attention or a sliding window through a cache
object, and refuses a model whose plain forward has other logits. Both agree with a plain forward of the model within
float rounding.

Invariant: the lean forward keeps no second copy of the weights. The fused matrices are the storage, and the model's
parameters become views into them, so weights copied into the parameters reach both.

`Reading` is the exact mode (`runtime.deterministic`), in which engine and trainer get the same bits. The rounding of a
kernel depends on the shapes that it is given. So both read each sequence alone, in blocks of a fixed length, each after
the keys and values of the blocks before it, and compute the log-prob of a token from one row of logits. The last tokens
of a block may be missing: nothing before them depends on the values in their places.

Shape suffixes: R rows, T tokens of a row, N = R*T, H query heads, K kv heads, G = H / K, D head size, E columns
read, X hidden size, V vocabulary, B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from rillflow import kernels
from rillflow.engine.embedded.cache import Batch, Columns, KVCache
from rillflow.errors import EngineError
from rillflow.weights.models import rotary_limit

_LEAN = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # tables that do not depend on the length of a sequence
_FULL, _SLIDING = "full_attention", "sliding_attention"
_CHECKED = 16  # tokens that a model is tried with
BLOCK = 16


class Forward(Protocol):
    def __call__(self, batch: Batch) -> torch.Tensor:
        """Write the batch's keys and values; return logits [R, V] of each row's last token."""

    def logits(self, ids_RT: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, T, V] after every token of new sequences; the cache does not change."""

    def refresh(self) -> None:
        """Recompute what is derived from the weights; called after they changed."""


def make_forward(model: Any, cache: KVCache, *, lean: bool = True) -> Forward:
    """Return the lean forward where it fits the model, else the library's. The lean one changes the layout of the
    weights: the model's own forward then runs other kernels, with other bits."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or [_FULL])
    if unknown := sorted(kinds - {_FULL, _SLIDING}):
        raise EngineError(
            f"the embedded engine cannot run layers of kind {', '.join(unknown)}",
            "use a model whose layers have full attention or a sliding window, or another engine",
        )
    _check_rotary(config, cache.context)
    if lean and cache.window is None and kinds == {_FULL} and _is_lean(model):
        return LeanForward(model, cache)

    forward = LibraryForward(model, cache)
    forward.check()
    return forward


def _check_rotary(config: Any, context: int) -> None:
    """Refuse sequences beyond the rotary embedding's limit: keys that are cached would have another one."""
    limit = rotary_limit(config)
    if limit is not None and context > limit:
        kind = config.rope_parameters["rope_type"]
        raise EngineError(
            f"the embedded engine cannot run {type(config).__name__} with {context} tokens: beyond {limit} its "
            f"rotary embedding ({kind}) is another one",
            f"set engine.context to {limit} or less, or use another engine",
        )


def _is_lean(model: Any) -> bool:
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    layer = model.model.layers[0] if type(model).__name__ in _LEAN else None
    return (
        layer is not None
        and rope in _STATIC_ROPE
        and config.hidden_act == "silu"
        and layer.self_attn.o_proj.bias is None
        and layer.mlp.down_proj.bias is None
        and layer.mlp.gate_proj.bias is None
    )


def _fuse(linears: list[nn.Linear]) -> torch.Tensor:
    """Move the weights side by side into one [in, out] matrix, of which the parameters become views.

    Small matrix products on CPUs are fastest in that orientation, too.
    """
    fused = torch.cat([linear.weight.detach() for linear in linears]).t().contiguous()
    at = 0
    for linear in linears:
        linear.weight.data = fused[:, at : at + linear.out_features].t()
        at += linear.out_features
    return fused


def _fuse_bias(linears: list[Any]) -> torch.Tensor | None:
    if linears[0].bias is None:
        return None
    fused = torch.cat([linear.bias.detach() for linear in linears])
    at = 0
    for linear in linears:
        linear.bias.data = fused[at : at + linear.out_features]
        at += linear.out_features
    return fused


class _Layer:
    """The tensors of one decoder layer, fused."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = _fuse(projections)
        self.qkv_bias = _fuse_bias(projections)
        self.out = _fuse([attention.o_proj])
        self.gate_up = _fuse([mlp.gate_proj, mlp.up_proj])
        self.down = _fuse([mlp.down_proj])
        self.scaling: float = attention.scaling
        self.heads: int = attention.q_proj.out_features // attention.head_dim
        self.kv_heads: int = attention.k_proj.out_features // attention.head_dim
        self.head_size: int = attention.head_dim
        self.first_norm = layer.input_layernorm
        self.second_norm = layer.post_attention_layernorm
        self._head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.head_weight: torch.Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """One row of weights per head, so that queries and keys are normed together."""
        if self._head_norms is not None:
            query, key = (norm.weight.detach() for norm in self._head_norms)
            self.head_weight = torch.cat((query.expand(self.heads, -1), key.expand(self.kv_heads, -1)))


Attention = Callable[[int, _Layer, torch.Tensor], torch.Tensor]
AttendColumns = Callable[[Columns, int, _Layer, torch.Tensor], torch.Tensor]


class LeanForward:
    """The Llama family in about twenty operators a layer."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._cache = cache
        self._eps: float = model.config.rms_norm_eps
        self._eps_tensor = torch.tensor(self._eps)
        self._fused_norm = model.device.type != "cpu" or model.dtype != torch.float32
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._norm = model.model.norm
        self._head: torch.Tensor = model.lm_head.weight
        self._head_bias: torch.Tensor | None = model.lm_head.bias
        positions = torch.arange(cache.context, device=cache.device)[None]
        cos, sin = model.model.rotary_emb(self._embedding[:1], positions)
        half = cos.shape[-1] // 2
        # Rotating by half and flipping the sign of the first half is the same as flipping it in the table.
        self._cos_CD: torch.Tensor = cos[0].contiguous()
        self._sin_CD: torch.Tensor = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self._attend_columns = self._compiled() if cache.compiles else None
        cache.compiled = cache.compiles

    def _compiled(self) -> AttendColumns:
        """Return compiled attention, after it was compiled."""
        from rillflow.kernels.decode import Turned, attend, compile_now  # its compiler takes a second to import

        with kernels.one_compiles():
            compile_now()

        none_0D = self._cos_CD.new_empty(0, self._cos_CD.shape[-1])

        def attend_columns(columns: Columns, index: int, layer: _Layer, qkv_RAD: torch.Tensor) -> torch.Tensor:
            weight_AD = none_0D if layer.head_weight is None else layer.head_weight
            turned = Turned(weight_AD, self._eps, self._cos_CD, self._sin_CD)
            return attend(qkv_RAD, turned, *self._cache.arrays(index), columns, layer.scaling)

        return attend_columns

    def refresh(self) -> None:
        for layer in self._layers:
            layer.refresh()

    def logits(self, ids_RT: torch.Tensor) -> torch.Tensor:
        rows, width = ids_RT.shape
        batch = Batch(
            ids_RT=ids_RT,
            positions_RT=torch.arange(width, device=ids_RT.device).repeat(rows, 1),
            rows=slice(0, 0),
            write_N2K=None,
            extent=width,
            mask_RTE=None,
            last_R=None,
        )
        return self(batch).view(rows, width, -1)

    def __call__(self, batch: Batch) -> torch.Tensor:
        attend = self._attention(batch)
        x_NX = F.embedding(batch.ids_RT.view(-1), self._embedding)
        for index, layer in enumerate(self._layers):
            qkv_NAD = self._project(layer, self._rms(x_NX, layer.first_norm.weight))
            x_NX = torch.addmm(x_NX, attend(index, layer, qkv_NAD), layer.out)
            gate, up = (self._rms(x_NX, layer.second_norm.weight) @ layer.gate_up).chunk(2, -1)
            x_NX = torch.addmm(x_NX, F.silu(gate).mul_(up), layer.down)
        if batch.last_R is not None:
            x_NX = x_NX[batch.last_R]
        return F.linear(self._rms(x_NX, self._norm.weight), self._head, self._head_bias)

    def _attention(self, batch: Batch) -> Attention:
        """Return what turns a layer's new heads to their positions, stores them and attends."""
        if self._attend_columns is not None and batch.columns is not None:
            return partial(self._attend_columns, batch.columns)
        positions_N = batch.positions_RT.view(-1)
        cos_N1D, sin_N1D = self._cos_CD[positions_N][:, None], self._sin_CD[positions_N][:, None]

        def attend(index: int, layer: _Layer, qkv_NAD: torch.Tensor) -> torch.Tensor:
            self._turn(layer, qkv_NAD, cos_N1D, sin_N1D)
            return self._attend(index, layer, batch, qkv_NAD)

        return attend

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; `weight` may differ from head to head."""
        if self._fused_norm:
            whole = weight if weight.dim() == 1 else None
            normed = F.rms_norm(x, (x.shape[-1],), whole, self._eps)
            return normed if whole is not None else normed * weight
        # On a CPU the library's norm is seven operators; this is four, and the same within a rounding.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    def _project(layer: _Layer, x_NX: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values as heads side by side, A = H + 2K of them."""
        flat = x_NX @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, x_NX, layer.qkv)
        return flat.view(x_NX.shape[0], -1, layer.head_size)

    def _turn(self, layer: _Layer, qkv_NAD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor) -> None:
        """Norm queries and keys, if the model does, and rotate them to their positions."""
        qk_NAD = qkv_NAD[:, : layer.heads + layer.kv_heads]
        turned = qk_NAD
        if layer.head_weight is not None:
            turned = self._rms(qk_NAD, layer.head_weight)
        rolled = turned.roll(layer.head_size // 2, -1)
        torch.addcmul(turned * cos_N1D, rolled, sin_N1D, out=qk_NAD)

    def _attend(self, index: int, layer: _Layer, batch: Batch, qkv_NAD: torch.Tensor) -> torch.Tensor:
        """Store the new keys and values; return the attention of the new queries."""
        if batch.write_N2K is not None:
            self._cache.write(index, batch, qkv_NAD[:, layer.heads :].reshape(-1, layer.head_size))
        rows, width = batch.ids_RT.shape
        if batch.stretches:  # decode: the G query heads of a kv head stand where several tokens would; no copies
            q_RKGD = qkv_NAD[:, : layer.heads].view(rows, layer.kv_heads, -1, layer.head_size)
            return self._attend_one(index, layer, batch, q_RKGD).reshape(rows, -1)
        qkv_RATD = qkv_NAD.view(rows, width, -1, layer.head_size).transpose(1, 2)
        query = qkv_RATD[:, : layer.heads]
        if batch.mask_RTE is None:  # nothing cached: the new keys and values are all there is
            key = qkv_RATD[:, layer.heads : layer.heads + layer.kv_heads]
            value = qkv_RATD[:, layer.heads + layer.kv_heads :]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=True
            )
        else:
            key, value = self._cache.read(index, batch)
            mask = batch.mask_RTE[:, None]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=layer.scaling, enable_gqa=True
            )
        return out.transpose(1, 2).reshape(rows * width, -1)

    def _attend_one(self, index: int, layer: _Layer, batch: Batch, q_RKGD: torch.Tensor) -> torch.Tensor:
        """Return the attention of the new token of each row: rows alike in length at once, each as far as it goes."""
        parts = [
            F.scaled_dot_product_attention(
                q_RKGD[rows], *self._cache.read_rows(index, rows, extent), attn_mask=mask, scale=layer.scaling
            )
            for (rows, extent), mask in batch.stretches
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


# ------------------------------------------------------------ the library's own forward


class _SlotCache(Cache):  # type: ignore[misc]
    """The cache object that the model gets: `update` stores into the slots and returns views of them."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self.batch: Batch | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batch is None:
            raise RuntimeError("the slot cache is used outside a forward")
        kv_RT2KD = torch.stack((key_states.transpose(1, 2), value_states.transpose(1, 2)), 2)
        self._cache.write(layer_idx, self.batch, kv_RT2KD.reshape(-1, key_states.shape[-1]))
        return self._cache.read(layer_idx, self.batch)


class LibraryForward:
    """The model's own forward: slower than the lean one for small models, correct for all."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._slots = _SlotCache(cache)
        self._slides = _SLIDING in (getattr(model.config, "layer_types", None) or ())

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def logits(self, ids_RT: torch.Tensor) -> torch.Tensor:
        logits_RTV: torch.Tensor = self._model(input_ids=ids_RT, use_cache=False).logits
        return logits_RTV

    @torch.inference_mode()
    def check(self) -> None:
        """Raise EngineError if a few tokens have other logits than in the model's plain forward: its attention uses
        something that our masks do not have, such as ALiBi's distances. The cache must be empty, and is emptied."""
        ids_T = np.arange(min(_CHECKED, self._cache.context)) % self._model.config.vocab_size
        plain_V = self._model(input_ids=torch.from_numpy(ids_T)[None].to(self._model.device), use_cache=False).logits[
            0, -1
        ]
        slot_R, width = np.zeros(1, np.int64), len(ids_T) // 2
        try:
            for start, part in ((0, ids_T[:width]), (width, ids_T[width:])):
                batch = self._cache.prefill_batch(slot_R, part[None], slot_R + start, slot_R + len(part))
                ours_RV = self(batch)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise self._refused(f"{type(error).__name__}: {error}") from error
        self._cache.clear()
        apart = float((ours_RV[0] - plain_V).abs().max() / plain_V.abs().max().clamp(min=1e-6))
        if not apart <= (1e-3 if plain_V.dtype == torch.float32 else 0.1):
            raise self._refused(f"logits are {apart:.2g} of the largest one apart from the model's own")

    def _refused(self, why: str) -> EngineError:
        return EngineError(
            f"the embedded engine cannot run {type(self._model).__name__}: {why:.300}",
            "use a model of plain attention, or another engine",
        )

    def __call__(self, batch: Batch) -> torch.Tensor:
        mask_RTE = batch.mask_RTE
        if mask_RTE is None:
            mask_RTE = self._cache.mask(batch.positions_RT, batch.extent)
        self._slots.batch = batch
        width = batch.ids_RT.shape[1]
        # The model can keep the logits of some columns, the same for all rows: ask for those where some row ends.
        ends_R = batch.last_R % width if batch.last_R is not None else batch.ids_RT.new_zeros(batch.ids_RT.shape[0])
        keep, at_R = torch.unique(ends_R, return_inverse=True)
        output = self._model(
            input_ids=batch.ids_RT,
            attention_mask=self._masks(batch, mask_RTE),
            position_ids=batch.positions_RT,
            past_key_values=self._slots,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits_RV: torch.Tensor = output.logits[torch.arange(len(at_R), device=at_R.device), at_R]
        return logits_RV

    def _masks(self, batch: Batch, mask_RTE: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the mask of all layers, or that of each kind of layer."""
        if not self._slides:
            return mask_RTE[:, None]
        window = self._model.config.sliding_window
        near_RTE = self._cache.mask(batch.positions_RT, batch.extent, window)
        return {_FULL: mask_RTE[:, None], _SLIDING: near_RTE[:, None]}


# ------------------------------------------------------------ exact mode


def read_block(model: Any, cache: DynamicCache, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the next block of a sequence and add the block to `cache`; `tokens` may be fewer."""
    block_B = tokens.new_zeros(BLOCK)
    block_B[: len(tokens)] = tokens
    logits_BV: torch.Tensor = model(input_ids=block_B[None], past_key_values=cache, use_cache=True).logits[0]
    return logits_BV


def logprob(logits_V: torch.Tensor, token: int, temperature: float) -> torch.Tensor:
    """Return the log-prob of one token in float32, computed as `sampling.draw` computes it."""
    scaled_1V = (logits_V[None].float() - logits_V[None].float().amax(-1, keepdim=True)) / temperature
    total_1 = scaled_1V.exp().cumsum(-1, dtype=torch.float64)[:, -1]
    return (scaled_1V[:, token].double() - total_1.log()).float()[0]


class Reading:
    """A growing sequence: its complete blocks are read once, the last block again for each of its tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after all of `tokens`, which begin with those of earlier calls, as one row."""
        while True:
            start = self._cache.get_seq_length()
            logits_BV = read_block(self._model, self._cache, tokens[start : start + BLOCK])
            if len(tokens) <= start + BLOCK:
                break
        if len(tokens) < start + BLOCK:
            self._cache.crop(-BLOCK)
        last = len(tokens) - 1 - start
        return logits_BV[last : last + 1]
