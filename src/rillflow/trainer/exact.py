"""Scores of a micro-batch with exactly the bits of the embedded engine's exact mode: each row is read alone.

Rows must not share segments (no trees), and layers must not be recomputed in backward: their keys and values go from
block to block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from rillflow.engine.embedded.exact import BLOCK, logprob, read_block
from rillflow.trainer.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def exact_scores(model: PreTrainedModel, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of the targets and the entropies of their distributions, with gradient."""
    layout = micro.layout
    logits = [
        _logits(model, layout.tokens_P[start : start + length])
        for start, length in zip(layout.start_S.tolist(), layout.length_S.tolist(), strict=True)
    ]
    logits_TV = torch.cat(logits).index_select(0, micro.select_T)
    temperature_T = micro.columns["temperature_T"]
    chosen = zip(logits_TV, micro.target_T.tolist(), temperature_T.tolist(), strict=True)
    score_T = torch.stack([logprob(logits_V, target, temperature) for logits_V, target, temperature in chosen])
    log_TV = (logits_TV.float() / temperature_T[:, None]).log_softmax(-1)
    return score_T, -(log_TV.exp() * log_TV).sum(-1)


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits after each token of a row."""
    cache = DynamicCache()
    blocks = [read_block(model, cache, tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)]
    return torch.cat(blocks)[: len(tokens)]
