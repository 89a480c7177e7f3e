"""The definition of the distribution that tokens are drawn from, and the settings on which every engine must match it.

The grid has no `min_p`, penalties or `logit_bias`: engines refuse them by name (`test_odd_values.py`,
`test_server_engine.py`).
"""

from __future__ import annotations

import itertools

import torch

Setting = tuple[float, float, int]  # temperature, top_p, top_k
GRID: list[Setting] = list(itertools.product((0.0, 0.6, 1.0, 1.3), (1.0, 0.8), (0, 5, 20)))


def drawn_from(rows: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Return the log-probs of what is left of logits: tempered, then the likeliest, then the share. At temperature 0
    the likeliest token alone is left."""
    if temperature == 0.0:
        temperature, top_p, top_k = 1.0, 1.0, 1
    rows = rows / temperature
    if top_k:
        rows = rows.masked_fill(rows < rows.topk(top_k).values[:, -1:], -torch.inf)
    order = rows.argsort(-1)
    less = rows.gather(-1, order).softmax(-1).cumsum(-1) <= 1 - top_p
    less[:, -1] = False
    return rows.masked_fill(torch.zeros_like(less).scatter(-1, order, less), -torch.inf).log_softmax(-1)
