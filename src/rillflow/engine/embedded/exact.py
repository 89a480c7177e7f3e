"""How engine and trainer read a sequence where both must get the same bits (`runtime.deterministic`).

What a kernel rounds depends on the shapes that it is given. So both read a sequence alone, in blocks of a fixed length,
each after the keys and values of the blocks before it, and take the log-prob of a token from a row of logits by itself.
A block may lack its last tokens: nothing before them depends on what stands there.

Shape suffixes: B tokens of a block, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

BLOCK = 16


def read_block(model: Any, cache: DynamicCache, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the next block of a sequence, which `cache` grows by; `tokens` may be fewer than a block."""
    block_B = tokens.new_zeros(BLOCK)
    block_B[: len(tokens)] = tokens
    logits_BV: torch.Tensor = model(input_ids=block_B[None], past_key_values=cache, use_cache=True).logits[0]
    return logits_BV


def logprob(logits_V: torch.Tensor, token: int, temperature: float) -> torch.Tensor:
    """Of one token, computed as `sampling.draw` does; float32."""
    scaled_1V = (logits_V[None].float() - logits_V[None].float().amax(-1, keepdim=True)) / temperature
    total_1 = scaled_1V.exp().cumsum(-1, dtype=torch.float64)[:, -1]
    return (scaled_1V[:, token].double() - total_1.log()).float()[0]


class Reading:
    """A sequence that grows: its complete blocks are read once, the last one again for each of its tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after all of `tokens`, of which the first are those of earlier calls, as one row."""
        while True:
            start = self._cache.get_seq_length()
            logits_BV = read_block(self._model, self._cache, tokens[start : start + BLOCK])
            if len(tokens) <= start + BLOCK:
                break
        if len(tokens) < start + BLOCK:
            self._cache.crop(-BLOCK)
        last = len(tokens) - 1 - start
        return logits_BV[last : last + 1]
