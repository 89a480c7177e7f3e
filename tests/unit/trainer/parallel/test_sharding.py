"""Sharded models compute what whole ones do. Sharding is a whole process's: the ranks are real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from commands import Warm
from forked_ranks import run_ranks
from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.parallel import Alone
from rillflow.trainer.parallel.sharding import entered, shard, whole
from soak import repetitions

RANK = Path(__file__).with_name("sharded_rank.py")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("ranks", repetitions([3, 4], [2, 3, 4]))
def test_shards_compute_what_the_whole_does(warm: Warm, tmp_path: Path, ranks: int) -> None:
    run_ranks(RANK, ranks, tmp_path, str(tmp_path), warm=warm)


class Pair(Alone):
    size = 2


def test_whole_models_stay_as_they_are() -> None:
    model = nn.Linear(2, 2)
    for config, peers in ((TrainerConfig(), Pair()), (TrainerConfig(sharding="fsdp"), Alone())):
        shard(model, config, peers)  # type: ignore[arg-type]
        assert type(model) is nn.Linear
    assert entered(model, abs) is abs
    assert whole(model.weight, torch.float32) is model.weight


def test_masters_are_never_rounded_before_they_are_sharded() -> None:
    with pytest.raises(ConfigError, match="fp32"):
        shard(nn.Linear(2, 2).to(torch.bfloat16), TrainerConfig(sharding="fsdp"), Pair())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"copies": 2, "ranks": 2}, "copies and accumulate belong to sharding: fsdp"),
        ({"accumulate": "whole"}, "copies and accumulate belong to sharding: fsdp"),
        ({"sharding": "fsdp", "ranks": 3, "copies": 2}, r"ranks \(3\) must be a multiple of copies \(2\)"),
    ],
)
def test_copies_and_late_reduction_need_shards_that_fit(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainerConfig(**settings)


def test_ranks_that_cannot_hold_the_copies_are_refused() -> None:
    config = TrainerConfig(sharding="fsdp", ranks=4, copies=4)
    with pytest.raises(ConfigError, match="2 ranks cannot hold 4 copies"):
        shard(nn.Linear(2, 2), config, Pair())  # type: ignore[arg-type]
