"""Any transformers causal model with full attention: its own forward, reading and writing our slots of KV cache.

Shape suffixes: R rows, T tokens of a row, K kv heads, D head size, E columns read, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from rillflow.engine.embedded.cache import Batch, KVCache


class _SlotCache(Cache):  # type: ignore[misc]
    """What the model takes for its cache: `update` stores into the slots and returns views of them."""

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
    """The model's own forward. Slower than the lean one for small models, and right for all."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._slots = _SlotCache(cache)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

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
