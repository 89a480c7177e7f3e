"""The rows of the benchmark of trees are rows of the trainer."""

from __future__ import annotations

import torch

from bench.tree import Case, make_rows
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.packing import micro_batches


def test_its_rows_share_what_they_say() -> None:
    data = Databuffer(make_rows(Case(0.5, 100, 4, 2), 50))
    (make,) = micro_batches(data, [], 1 << 20, device=torch.device("cpu"), trees=True)
    assert len(make().layout.tokens_P) == 2 * (50 + 4 * 49)
