"""A run that goes on with another number of ranks, and sharded otherwise: real processes, the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_rank_runs import CALM, STEPS, Run, Trainers, assert_same_curves, trainers

from rillflow.config import write_resolved
from soak import repetitions

pytestmark = pytest.mark.slow

__all__ = ["trainers"]  # a fixture

SHORT: list[dict[str, Any]] = [
    {"ranks": 4, "sharding": "fsdp", "steps": 4},
    {"ranks": 2, "sharding": "none", "steps": 8},
    {"ranks": 1, "sharding": "none", "steps": STEPS},
]
LONG: list[dict[str, Any]] = [
    {"ranks": 4, "sharding": "fsdp", "steps": 3},
    {"ranks": 2, "sharding": "fsdp", "steps": 6},
    {"ranks": 4, "sharding": "none", "steps": 9},
    {"ranks": 1, "sharding": "none", "steps": STEPS},
]
LIVES = repetitions(SHORT, LONG)


def go_on(trainers: Trainers, run: Run, **trainer: Any) -> None:
    """Another life of the trainer, under a recipe that was changed."""
    recipe = run.folder.recipe.model_dump()
    recipe["policies"]["p"]["trainer"] |= trainer
    write_resolved(type(run.folder.recipe).model_validate(recipe), run.folder.root / "recipe.yaml")
    assert trainers.start(run.folder).wait(400) == 0, run.log()


@pytest.mark.soak
def test_four_ranks_then_two_then_one(trainers: Trainers, tmp_path: Path) -> None:
    """With a critic, whose state is in the checkpoints, too."""
    ppo: dict[str, Any] = {"algorithm": "ppo", "critic": {"lr": 2e-3}, "checkpoint_every": 2}
    expected = trainers.curve(tmp_path / "one", **ppo)
    with trainers.started(tmp_path / "other", STEPS, **{**CALM, **ppo, **LIVES[0]}) as run:
        assert run.ends() == 0, run.log()
        for life in LIVES[1:]:
            go_on(trainers, run, **life)
        assert [commit.version for commit in run.peer.commits] == list(range(1, STEPS + 1))
        got = [commit.metrics for commit in run.peer.commits], run.weights()
    assert_same_curves(got, expected)
