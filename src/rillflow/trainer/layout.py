"""Rows of a micro-batch as the model reads them: end to end, without padding, as a forest of segments.

A segment is a run of tokens. One without a parent begins a row; one with a parent goes on where its parent ends, and
attends to all tokens of its ancestors. Without prefix sharing every row is one segment without a parent. Invariants:
parents come before their children; a token's position is its distance from the beginning of its row; every token
attends to itself, to the tokens before it in its segment and to its segment's ancestors, and to nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints


@dataclass(frozen=True)
class Layout:
    """`tokens_P` and `position_P` are on the device; segment s is `[start_S[s], start_S[s] + length_S[s])` of P, its
    parent `parent_S[s]`, or -1."""

    tokens_P: torch.Tensor
    position_P: torch.Tensor
    start_S: Ints
    length_S: Ints
    parent_S: Ints


@dataclass(frozen=True)
class MicroBatch:
    """The hidden state at packed position `select_T` gives the score of a trained token, `target_T`, whose row (of
    `rows` in this micro-batch) is `row_T`. `columns` are over the same tokens: `old_T`, `temperature_T`, …; `source_T`
    says which token of the databuffer each of them is, `depth_T` its place in its row, and `kept_T` its sample where
    that is told of for people, else 0 (`trainer.kept`).

    A token that several rows share appears once for each row that trains it, perhaps at the same position.
    """

    layout: Layout
    select_T: torch.Tensor
    target_T: torch.Tensor
    row_T: torch.Tensor
    rows: int
    columns: Mapping[str, torch.Tensor]
    source_T: Ints
    depth_T: Ints
    kept_T: Ints


def runs(first: Ints, count: Ints) -> Ints:
    """`first[i], first[i] + 1, …`, `count[i]` of them, one run after the other."""
    before = np.cumsum(count) - count
    run: Ints = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return run
