"""Any transformers causal model with full attention, or with one sliding window: its own forward, reading and writing
our slots of KV cache.

Shape suffixes: R rows, T tokens of a row, K kv heads, D head size, E columns read, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from rillflow.engine.embedded.cache import Batch, KVCache
from rillflow.errors import EngineError

_CHECKED = 16  # tokens that a model is tried with


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
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
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
            attention_mask=mask_RTE[:, None],
            position_ids=batch.positions_RT,
            past_key_values=self._slots,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits_RV: torch.Tensor = output.logits[torch.arange(len(at_R), device=at_R.device), at_R]
        return logits_RV
