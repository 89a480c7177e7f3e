"""Advantages by hand. tests/conformance/oracle compares random batches with verl and TRL."""

from __future__ import annotations

import numpy as np
import pytest

from rillflow.trainer.algorithms.advantages import (
    CONVENTIONS,
    Groups,
    centred,
    gae,
    leave_one_out,
    normalised,
    outcome_rewards,
    returns_to_go,
    soft_overlong,
    standardise,
    step_advantages,
    whiten,
)

VERL, TRL, ASTRAFLOW = (CONVENTIONS[name] for name in ("verl", "trl", "astraflow"))
NAN = float("nan")


def test_the_unbiased_std_of_the_group_and_each_conventions_epsilon() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    groups = Groups.of(rewards, np.zeros(4, dtype=np.int64))
    for convention, epsilon in ((VERL, 1e-6), (TRL, 1e-4), (ASTRAFLOW, 1e-5)):
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)
        np.testing.assert_allclose(normalised(rewards, groups, convention), expected, rtol=1e-12)


def test_groups_need_not_lie_together() -> None:
    groups = Groups.of(np.array([1.0, 5.0, 3.0, 5.0]), np.array([7, 2, 7, 2]))
    np.testing.assert_allclose(groups.mean_R, [2, 5, 2, 5])
    np.testing.assert_allclose(groups.std_R, [1, 0, 1, 0])
    np.testing.assert_array_equal(groups.size_R, [2, 2, 2, 2])


@pytest.mark.parametrize("of", [normalised, centred, leave_one_out])
def test_lone_rows_keep_their_score_with_verl_alone(of) -> None:  # type: ignore[no-untyped-def]
    score_R = np.array([0.7, 0.3])
    groups = Groups.of(score_R, np.array([0, 1]))
    np.testing.assert_allclose(of(score_R, groups, VERL), score_R, rtol=2e-6)
    np.testing.assert_array_equal(of(score_R, groups, TRL), [0, 0])
    np.testing.assert_array_equal(of(score_R, groups, ASTRAFLOW), [0, 0])


@pytest.mark.parametrize("of", [normalised, centred, leave_one_out])
def test_equal_scores_give_nothing(of) -> None:  # type: ignore[no-untyped-def]
    score_R = np.ones(3)
    np.testing.assert_array_equal(of(score_R, Groups.of(score_R, np.zeros(3, dtype=np.int64)), VERL), np.zeros(3))


def test_leave_one_out_is_against_the_mean_of_the_others() -> None:
    score_R = np.array([1.0, 2.0, 6.0])
    ours_R = leave_one_out(score_R, Groups.of(score_R, np.zeros(3, dtype=np.int64)), VERL)
    np.testing.assert_allclose(ours_R, [1 - 4, 2 - 3.5, 6 - 1.5])


def test_answers_rewards_become_their_tokens_advantages() -> None:
    """Two rows of one group: answers of 2 and 1 tokens, then one of 3 and a token after the last rewarded answer."""
    reward_T = np.array([NAN, 0.0, 1.0, NAN, NAN, 2.0, NAN])
    row_T = np.array([0, 0, 0, 1, 1, 1, 1])
    unit = 1 / (1 + VERL.epsilon)
    own_T = step_advantages(reward_T, row_T, np.array([0, 0]), VERL)
    np.testing.assert_allclose(own_T, np.array([-1, -1, 0, 1, 1, 1, 0]) * unit)
    to_go_T = step_advantages(reward_T, row_T, np.array([0, 0]), VERL, to_go=True)
    np.testing.assert_allclose(to_go_T, np.array([-1, -1, 0, 1, 1, 1, 0]) * unit)
    better_T = step_advantages(
        np.array([NAN, 0.0, 3.0, 0.0]), np.array([0, 0, 0, 1]), np.array([0, 0]), TRL, to_go=True
    )
    assert better_T[0] == pytest.approx(better_T[2] - better_T[2] / 2)


def test_rows_without_rewarded_answers_have_no_advantage() -> None:
    np.testing.assert_array_equal(
        step_advantages(np.full(3, NAN), np.zeros(3, int), np.zeros(1, int), VERL), np.zeros(3)
    )
    reward_T, row_T = np.array([NAN, NAN, 1.0, 0.0]), np.array([0, 0, 1, 1])
    np.testing.assert_array_equal(step_advantages(reward_T, row_T, np.array([0, 0]), VERL)[:2], [0, 0])


def test_returns_run_back_from_the_end_of_each_row() -> None:
    row_T = np.array([0, 0, 0, 2, 2])
    reward_T = outcome_rewards(np.array([4.0, 9.0, 8.0]), row_T)
    np.testing.assert_array_equal(reward_T, [0, 0, 4, 0, 8])
    np.testing.assert_allclose(returns_to_go(reward_T, row_T, 0.5), [1, 2, 4, 4, 8])


def test_gae_by_hand() -> None:
    """gamma 0.5, lambda 0.5: the surprises are 2 - 3 and 0 + 0.5 * 3 - 1."""
    advantage_T, return_T = gae(np.array([0.0, 2.0]), np.array([1.0, 3.0]), np.array([0, 0]), 0.5, 0.5)
    np.testing.assert_allclose(advantage_T, [0.5 + 0.25 * -1, -1])
    np.testing.assert_allclose(return_T, [0.25 + 1, -1 + 3])


def test_nothing_in_nothing_out() -> None:
    none, of = np.zeros(0), np.zeros(0, dtype=np.int64)
    assert len(returns_to_go(none, of)) == len(gae(none, none, of)[0]) == len(outcome_rewards(none, of)) == 0
    assert len(whiten(none)) == 0


def test_whitening() -> None:
    each = np.array([1.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(whiten(each), (each - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8))
    np.testing.assert_allclose(standardise(each), (each - each.mean()) / (each.std() + 1e-5))
    np.testing.assert_array_equal(whiten(np.array([5.0])), [0])


def test_shaping() -> None:
    np.testing.assert_allclose(soft_overlong(np.array([5, 12, 16, 20, 30]), 20, 8), [0, 0, -0.5, -1, -1])
