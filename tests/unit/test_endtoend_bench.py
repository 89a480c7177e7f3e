"""What `bench.endtoend` gives both sides, and how it judges them."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import pytest
import yaml

from bench import endtoend, endtoend_task
from bench.common import Report
from bench.endtoend_cpu import Metered
from rillflow.config import load_recipe
from rillflow.config.load import resolve_object


def _side(reward: list[float], seconds: float, stale: list[float] | None = None) -> endtoend.Side:
    ended = [10.0 + seconds * step for step in range(1, len(reward) + 1)]
    cores = {"trainer": 0.01}
    return endtoend.Side(0.0, 10.0, ended, reward, [32.0] * len(reward), cores, heldout=reward[-1], stale=stale or [])


def test_lengths_are_long_tailed_and_the_same_for_the_same_seed() -> None:
    rows = list(endtoend_task.prompts("tails", 2000, 1))
    limits = [row["payload"]["limit"] for row in rows]
    assert rows == list(endtoend_task.prompts("tails", 2000, 1))
    assert 28 < statistics.mean(limits) < 37
    assert max(limits) > 5 * statistics.mean(limits)
    assert {row["payload"]["limit"] for row in endtoend_task.prompts("equal", 50, 1)} == {endtoend_task.EQUAL}


def test_the_reward_is_the_share_of_vowels() -> None:
    assert endtoend_task.reward({}, "aebc") == 0.5
    assert endtoend_task.reward({}, None) == 0.0


@pytest.mark.parametrize("case", endtoend.CASES)
def test_the_recipe_of_a_case_is_valid(case: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    made = endtoend.recipe(case, endtoend.CASES[case], "tiny", tmp_path / "prompts.jsonl", 1)
    file.write_text(yaml.safe_dump(made))
    recipe = load_recipe(str(file))
    assert callable(resolve_object(recipe.workflow))
    assert callable(resolve_object(recipe.reward))
    assert recipe.policies["agent"].trainer.batch_groups * recipe.dataflow.group_size == endtoend.BATCH


def test_twice_the_rate_is_a_ratio_of_two_and_staleness_is_told() -> None:
    reward = [0.1 * step for step in range(1, 11)]
    report = Report("endtoend")
    endtoend.tell(report, "equal", 2.0, [(_side(reward, 1.0, [1.0] * 10), _side(reward, 2.0))] * 3)
    rows = {row["name"]: row for row in report.results}
    assert rows["equal: samples/s"]["ratio"] == pytest.approx(2.0)
    assert rows["equal: samples/s"]["met"]
    assert rows["equal: time to the highest reward that both reach"]["ratio"] == pytest.approx(2.0)
    assert rows["equal: reward of the weights after equal samples, ours less TRL's"]["met"]
    assert rows["equal: staleness of a sample, mean"]["ours"] == 1.0


def test_a_reward_that_is_lower_in_every_seed_is_below() -> None:
    report = Report("endtoend")
    pairs = [(_side([0.5 + noise] * 6, 1.0, [0.0]), _side([0.6] * 6, 1.0)) for noise in (0.0, 0.01, 0.02)]
    endtoend.tell(report, "equal", None, pairs)
    rows = {row["name"]: row for row in report.results}
    assert rows["equal: reward of the weights after equal samples, ours less TRL's"]["met"] is False
    assert rows["equal: reward of the samples on the way, ours less TRL's"]["met"] is False


def test_processor_time_is_told_of_the_roles_of_a_command() -> None:
    begun = time.time()
    command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", "sum(range(20_000_000))"]
    with Metered(command, stdout=-3) as meter:
        assert meter.wait(120.0) == 0
    assert meter.between(begun, time.time())["timeit"] > 0
