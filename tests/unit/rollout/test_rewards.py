"""A reward is a number for all policies, or names each of them; none is made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rillflow.errors import RewardError, RillflowError, WorkflowError
from rillflow.rollout.rewards import require_all, rewards_of

TWO = ["solver", "checker"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, {"solver": 1.0, "checker": 1.0}),
        (np.float32(0.5), {"solver": 0.5, "checker": 0.5}),
        ({"checker": np.int64(2), "solver": False}, {"solver": 0.0, "checker": 2.0}),
        ({"checker": 0.25}, {"checker": 0.25}),
        (np.float64(3) > 2, {"solver": 1.0, "checker": 1.0}),
    ],
)
def test_numbers_and_mappings(value: Any, expected: dict[str, float]) -> None:
    found = rewards_of(value, TWO, answer_is_reward=False)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1.0", "not a number"),
        (None, "not a number"),
        ({}, "names no policy"),
        ({"solver": 1.0, "cheker": 1.0}, "no policy 'cheker'"),
        ({7: 1.0}, "no policy 7"),
        ({"solver": "1.0"}, "of solver: got '1.0'"),
        ({"solver": {"solver": 1.0}}, "of solver: got"),
    ],
)
@pytest.mark.parametrize(("from_workflow", "kind"), [(True, WorkflowError), (False, RewardError)])
def test_what_is_refused(value: Any, message: str, from_workflow: bool, kind: type[RillflowError]) -> None:
    with pytest.raises(kind, match=message):
        rewards_of(value, TWO, answer_is_reward=from_workflow)


@pytest.mark.parametrize("value", [float("nan"), {"solver": float("inf")}])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(RewardError, match=r"is (nan|inf)"):
        rewards_of(value, TWO, answer_is_reward=True)


@pytest.mark.parametrize(("from_workflow", "kind"), [(True, WorkflowError), (False, RewardError)])
def test_every_policy_that_sampled_has_a_reward(from_workflow: bool, kind: type[RillflowError]) -> None:
    require_all({"solver": 1.0}, {"solver"}, answer_is_reward=from_workflow)
    require_all({"solver": 1.0, "checker": 0.0}, {"checker"}, answer_is_reward=from_workflow)
    with pytest.raises(kind, match="sampled from checker, but the rewards name only solver"):
        require_all({"solver": 1.0}, {"solver", "checker"}, answer_is_reward=from_workflow)
