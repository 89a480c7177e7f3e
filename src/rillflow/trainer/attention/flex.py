"""Attention of a forest by torch's flex attention: one block-sparse mask for the whole pack.

In depth-first order a token sees another one exactly if the other is not after it, and its own place is before the end
of the other's segment's descendants.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rillflow.trainer.attention.passes import subtree_ends
from rillflow.trainer.attention.spans import Heads
from rillflow.trainer.packing import Layout


class Flex(NamedTuple):
    mask: BlockMask

    def __call__(self, heads: Heads, scale: float) -> torch.Tensor:
        run = _compiled() if heads.query.is_cuda and not torch.compiler.is_compiling() else flex_attention
        heads_first = (part.transpose(0, 1)[None] for part in heads)
        shared = heads.query.shape[1] != heads.key.shape[1]
        out: torch.Tensor = run(*heads_first, block_mask=self.mask, scale=scale, enable_gqa=shared)
        return out[0].transpose(0, 1)


def flex(layout: Layout) -> Flex:
    device = layout.tokens_P.device
    end_P = torch.from_numpy(np.repeat(subtree_ends(layout), layout.length_S)).to(device)

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < end_P[key])

    tokens = len(end_P)
    return Flex(create_block_mask(sees, None, None, tokens, tokens, device=str(device)))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Without compiling, flex attention holds all scores in memory."""
    return torch.compile(flex_attention, dynamic=True)
