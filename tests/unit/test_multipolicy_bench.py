"""What `bench.multipolicy` gives both sides, and how it reads and compares their runs."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import multipolicy
from bench.arms import Mean, Runs
from bench.multipolicy import DEVICE_SECONDS, DEVICES, OURS, PEER, POLICIES, STALENESS, Outcome, Steps
from bench.multipolicy_work import barrier, workflow
from rillflow.config import Recipe, load_recipe
from rillflow.dataflow.rules import Rules
from rillflow.errors import RunError
from rillflow.trainer.graph.builtin import chain_of


@pytest.fixture(autouse=True)
def _own_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning a graph adds the folder of its files to the search path: `bench/kernels.py` would hide a package."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def _recipe(side: str, folder: Path, seed: int = 3) -> Recipe:
    bench = multipolicy.Bench(Runs(folder, 1), steps=24)
    _, name, *overrides = bench.command(side, seed, folder)
    return load_recipe(name, overrides)


def _chain(recipe: Recipe, policy: str) -> dict[str, dict]:
    nodes = chain_of(recipe.policies[policy].trainer).nodes
    return {node.id: node.options for node in nodes}


def _outcome(solver: list[float], checker: list[float], begun: float = 100.0) -> Outcome:
    def steps(ended: list[float]) -> Steps:
        return Steps([begun + one for one in ended], [64] * len(ended), [0.5] * len(ended), 1.0, 2)

    return Outcome(7, begun, {"solver": steps(solver), "checker": steps(checker)}, Mean(0.6, 0.1), 400, 0, 0.0, 3, 1.6)


@pytest.mark.parametrize("side", [OURS, PEER])
def test_both_sides_train_each_policy_on_as_many_samples(side: str, tmp_path: Path) -> None:
    recipe = _recipe(side, tmp_path)
    assert tuple(recipe.policies) == POLICIES
    rules = Rules.of(recipe)
    for policy in rules.policies.values():
        assert (policy.batch_groups * rules.group_size, policy.total_steps) == (64, 24)
        assert policy.staleness == (STALENESS if side == OURS else 0)
    assert (recipe.seed, recipe.rollout.nodes, recipe.rollout.episodes) == (3, 1, 64)
    assert recipe.dataflow.filters == []


def test_without_a_barrier_each_trainer_has_a_device_of_its_own(tmp_path: Path) -> None:
    recipe = _recipe(OURS, tmp_path)
    for policy in POLICIES:
        chain = _chain(recipe, policy)
        assert chain["pace"] == {"seconds": DEVICE_SECONDS[policy]}
        assert list(chain)[-1] == "publish"


def test_the_synchronous_side_trains_on_all_devices_and_publishes_together(tmp_path: Path) -> None:
    recipe = _recipe(PEER, tmp_path)
    for policy in POLICIES:
        chain = _chain(recipe, policy)
        assert list(chain) == ["fetch", "advantages", "pace", "train_actor", "publish_together"]
        assert chain["pace"] == {"seconds": sum(DEVICE_SECONDS.values()) / DEVICES}
        assert chain["publish_together"] == {"folder": str(tmp_path), "policy": policy, "policies": list(POLICIES)}
        assert recipe.policies[policy].trainer.publish_delay == 0


def test_the_barrier_publishes_when_all_have_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[int] = []
    step = SimpleNamespace(number=5, publish=lambda: published.append(5))
    (tmp_path / "checker-5").touch()
    barrier.publish_together(step, str(tmp_path), "solver", POLICIES)
    assert published == [5]
    assert (tmp_path / "solver-5").exists()
    monkeypatch.setattr(barrier, "_PATIENCE", 0.0)
    step.number = 6
    with pytest.raises(RunError, match="checker-6 did not reach the barrier"):
        barrier.publish_together(step, str(tmp_path), "solver", POLICIES)
    assert published == [5]


def test_latencies_are_those_of_the_episode_and_have_a_long_tail() -> None:
    drawn = [workflow.latency(seed) for seed in range(4096)]
    assert drawn[9] == workflow.latency(9)
    assert drawn[9] != workflow.latency(9, turn=1)
    assert statistics.median(drawn) == pytest.approx(workflow.MEDIAN, rel=0.1)
    assert max(drawn) == workflow.LONGEST
    slowest = statistics.fmean(max(drawn[at : at + 64]) for at in range(0, len(drawn), 64))
    assert slowest > 4 * statistics.fmean(drawn)


def test_the_rate_counts_what_either_policy_trained_after_both_were_warm() -> None:
    one = _outcome(solver=[10.0, 20.0, 30.0, 40.0], checker=[4.0, 8.0, 21.0, 25.0])
    assert one.rate == 4 * 64 / (40.0 - 20.0)  # steps 3 and 4 of both
    assert one.seconds == 40.0
    assert one.policies["solver"].seconds == 10.0
    assert one.policies["checker"].seconds == 8.5
    assert _outcome([10.0, 20.0, 30.0], [4.0, 8.0, 15.0]).rate == 64 / 10.0


def test_seconds_that_repeated_episodes_cost_are_taken_off_all_later_steps() -> None:
    row = {"samples": 64, "reward": 0.5, "staleness_mean": 0.0, "staleness_max": 0.0}
    rows = [row | {"step": step, "time": 10.0 * step} for step in (1, 2, 3, 4)]
    assert multipolicy._steps(rows, {2: 4.0, 3: 1.0}).ended == [10.0, 16.0, 25.0, 35.0]


def test_the_time_to_a_reward_is_that_to_the_highest_that_both_reach() -> None:
    def outcome(rewards: list[float], step: float) -> Outcome:
        ended = [100.0 + step * place for place in range(1, len(rewards) + 1)]
        solver = Steps(ended, [64] * len(rewards), rewards, 0.0, 0)
        return Outcome(7, 100.0, {"solver": solver, "checker": solver}, Mean(0.6, 0.1), 400, 0, 0.0, 0, 1.6)

    ours, peer = outcome([0.0, 0.5, 0.5, 0.5, 0.5, 0.5], 2.0), outcome([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], 10.0)
    assert ours.policies["solver"].smooth == pytest.approx([0.4, 0.5])
    assert ours.policies["solver"].reward == 0.5
    assert multipolicy._times_to_reward([ours], [peer]) == (12.0, 50.0)


def test_the_report_compares_medians_over_the_seeds(tmp_path: Path) -> None:
    ours = [_outcome(ends, ends) for lasts in (2.0, 4.0, 16.0) if (ends := [1.0, 2.0, 2.5, 2.5, 2.0 + lasts])]
    peer = [_outcome([1.0, 2.0, 8.0, 8.0, 14.0], [1.0, 2.0, 8.0, 8.0, 14.0])] * 3
    multipolicy.report(ours, peer, str(tmp_path / "x.json"))
    written = json.loads((tmp_path / "x.json").read_text())
    rate, seconds, solver, *_ = written["results"]
    assert (rate["ours"], rate["peer"]) == (96.0, 32.0)
    assert (rate["ratio"], rate["goal"], rate["met"]) == (pytest.approx(3.0), 2.7, True)
    assert (seconds["ours"], seconds["peer"]) == (6.0, 14.0)
    assert (solver["ours"], solver["peer"]) == (pytest.approx(4 / 3), 4.0)
    assert written["runs"][OURS][0]["policies"]["solver"]["ended"] == [1.0, 2.0, 2.5, 2.5, 4.0]
    cells = dict(zip(multipolicy.HEAD, multipolicy.row(OURS, ours[1]), strict=True))
    assert (cells["samples/s"], cells["seed"], cells["held-out"]) == ("**96.0**", "7", "0.60")
