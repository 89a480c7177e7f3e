"""Tensor parallel: teams of ranks share the weights of layers, and compute what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from commands import Warm
from forked_ranks import run_ranks
from rillflow.config import TrainerConfig

RANK = Path(__file__).with_name("tensor_rank.py")


def test_a_team_of_two_computes_what_one_rank_does(warm: Warm, tmp_path: Path) -> None:
    run_ranks(RANK, 2, tmp_path, "short", "", warm=warm)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_checkpoints_and_families_of_teams_are_those_of_one_rank(warm: Warm, tmp_path: Path, ranks: int) -> None:
    run_ranks(RANK, ranks, tmp_path, "long", str(tmp_path / "checkpoints"), warm=warm)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_ranks": 2}, r"ranks \(1\) must be a multiple of tensor_ranks \(2\)"),
        ({"ranks": 2, "tensor_ranks": 2, "attention": "padded"}, "tensor_ranks shares packed rows"),
        ({"ranks": 2, "tensor_ranks": 2, "sharding": "fsdp"}, "does not work with sharding: fsdp"),
        ({"ranks": 2, "tensor_ranks": 2, "context_ranks": 2}, "does not work with context_ranks"),
        ({"ranks": 2, "tensor_ranks": 2, "lora": {}}, "does not work with lora"),
        ({"ranks": 2, "tensor_ranks": 2, "optimizer": "muon"}, "does not work with optimizer: muon"),
        ({"ranks": 2, "tensor_ranks": 2, "backend": "accelerate"}, "accelerate has no ranks, tensor_ranks"),
    ],
)
def test_what_cannot_share_weights_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainerConfig(**settings)
