"""What `bench.staleness` gives every arm, and how it reads their curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import staleness
from bench.arms import Mean, Runs
from bench.staleness import ARMS, BATCH, ON_POLICY, Curve, Point
from rillflow.config import load_recipe


def _curve(rewards: list[float], seed: int = 0) -> Curve:
    points = [Point(step, BATCH * step, 2.0 * step, reward) for step, reward in enumerate(rewards, 1)]
    return Curve(seed, Mean(rewards[-1], 0.02), points, [points[-1]], 1.5, 2, 0)


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_trains_on_as_many_samples(name: str, tmp_path: Path) -> None:
    url = "redis://127.0.0.1:6380/0"
    bench = staleness.Bench(Runs(tmp_path, 1), steps=40, pace=1.0, prompts=128, redis=url)
    _, recipe_name, *overrides = bench.command(name, 3)
    recipe = load_recipe(recipe_name, overrides)
    trainer = recipe.policies["agent"].trainer
    assert trainer.batch_groups * recipe.dataflow.group_size == BATCH
    assert recipe.dataflow.filters == []
    assert (recipe.dataflow.units.redis == url) == (name == staleness.REDIS)
    assert (recipe.seed, recipe.dataflow.staleness) == (3, ARMS[name].staleness)
    assert recipe.rollout.nodes * recipe.rollout.episodes == 64


def test_a_reward_is_reached_when_the_mean_of_five_steps_reaches_it() -> None:
    curve = _curve([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert curve.reached(0.8) == curve.training[4]
    assert curve.reached(0.9) == curve.training[5]
    assert _curve([0.7] * 8).reached(0.8) is None


def test_a_row_says_how_many_seeds_reached_a_reward() -> None:
    arm = staleness._plain(ON_POLICY, [_curve([1.0] * 5), _curve([0.5] * 5)])
    row = dict(zip(staleness.HEAD, staleness.row(ON_POLICY, arm), strict=True))
    assert row["samples / seconds to 0.9"] == f"{5 * BATCH} / 10 (1 of 2)"
    assert row["held-out reward after (each seed)"].endswith("(1.00, 0.50)")
    assert row["staleness: mean, most"] == "1.5, 2"


def test_the_picture_is_drawn_from_the_result(tmp_path: Path) -> None:
    arms = {name: staleness._plain(name, [_curve([0.2, 0.9])]) for name in (ON_POLICY, "staleness 2, TIS")}
    staleness.draw(arms, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
