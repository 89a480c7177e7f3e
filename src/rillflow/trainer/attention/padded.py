"""Rows of similar length, padded to the longest of them, for any causal model.

Padding follows every real token, so a causal model's outputs at real tokens do not depend on it: no mask is needed, and
the fast causal kernels can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.errors import ConfigError
from rillflow.trainer.packing import Layout, runs

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints

# Rows shorter than this share of the longest begin a new pass, once the current one has enough tokens.
_LIKE = 0.85
_ENOUGH = 1024


def hidden_states(decoder: torch.nn.Module, layout: Layout) -> torch.Tensor:
    if (layout.parent_S >= 0).any():
        raise ConfigError("padded attention cannot read trees", "set trainer.trees: false, or another attention")
    hidden, places = [], []
    for index in _alike(layout.length_S):
        length_B = layout.length_S[index]
        place_R = runs(layout.start_S[index], length_B)
        into_R = runs(np.arange(len(index)) * length_B.max(), length_B)
        hidden.append(_read(decoder, layout, place_R, into_R, (len(index), int(length_B.max()))))
        places.append(place_R)
    back_P = np.argsort(np.concatenate(places), kind="stable")
    return torch.cat(hidden).index_select(0, torch.from_numpy(back_P).to(layout.tokens_P.device))


def _read(
    decoder: torch.nn.Module, layout: Layout, place_R: Ints, into_R: Ints, shape: tuple[int, int]
) -> torch.Tensor:
    device = layout.tokens_P.device
    into = torch.from_numpy(into_R).to(device)
    tokens = layout.tokens_P.new_zeros(shape[0] * shape[1])
    tokens[into] = layout.tokens_P[torch.from_numpy(place_R).to(device)]
    read: torch.Tensor = decoder(input_ids=tokens.view(shape), use_cache=False).last_hidden_state
    return read.flatten(0, 1).index_select(0, into)


def _alike(length_S: Ints) -> Iterator[Ints]:
    """Yield segment numbers in parts of similar length, longest first."""
    order = np.argsort(-length_S, kind="stable")
    while len(order):
        longest = length_S[order[0]]
        fit = int(np.searchsorted(-length_S[order], -_LIKE * longest, side="right"))
        count = max(fit, -(-_ENOUGH // int(longest)))
        yield order[:count]
        order = order[count:]
