"""Reading a sequence so that engine and trainer get the same bits (`runtime.deterministic`).

The rounding of a kernel depends on the shapes that it is given. So both read each sequence alone, in blocks of a fixed
length, each after the keys and values of the blocks before it, and compute the log-prob of a token from one row of
logits. The last tokens of a block may be missing: nothing before them depends on the values in their places.

Shape suffixes: B tokens of a block, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

BLOCK = 16


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
