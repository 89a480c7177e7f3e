"""Log-probs of the trained tokens under the current weights, at the temperature they were sampled with.

The model's head runs on the hidden states of the trained positions only: a hook hands it those, so that whatever a
model does to its logits afterwards (scaling, soft caps) stays the model's own. A model without a separate head runs
in full and its logits are picked. Both give the numbers of a full `log_softmax`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from rillflow.trainer.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PolicyForward:
    """Calls a causal language model; `dtype` bf16 runs it under autocast, its weights staying fp32."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        self._model = model
        self._dtype = dtype
        self._select_T: torch.Tensor | None = None
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._has_head = head is not None
        if head is not None:
            head.register_forward_pre_hook(self._pick)

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the targets, with gradient, and the entropy of their distributions, without."""
        scaled_TV = self._logits(micro).float() / micro.temperature_T[:, None]
        all_TV = torch.log_softmax(scaled_TV, -1)
        with torch.no_grad():
            entropy_T = -(all_TV.exp() * all_TV).sum(-1)
        return all_TV.gather(-1, micro.target_T[:, None]).squeeze(-1), entropy_T

    def _logits(self, micro: MicroBatch) -> torch.Tensor:
        self._select_T = micro.select_T
        try:
            with self._precision(micro.tokens_BL.device):
                logits: torch.Tensor = self._model(input_ids=micro.tokens_BL, use_cache=False).logits
        finally:
            self._select_T = None
        return logits if self._has_head else logits.flatten(0, 1).index_select(0, micro.select_T)

    def _pick(self, head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._select_T is None:
            return None  # somebody else uses the model
        return (inputs[0].flatten(0, 1).index_select(0, self._select_T), *inputs[1:])

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self._dtype)
