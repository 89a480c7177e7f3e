"""Our advantages are verl's and TRL's."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_batches import SEEDS, Padded, random_batch

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
    whiten,
)

pytestmark = pytest.mark.oracle

Oracle = dict[str, np.ndarray]
BY_GROUP = {"grpo": normalised, "dr_grpo": centred, "rloo": leave_one_out}
VERL, TRL = CONVENTIONS["verl"], CONVENTIONS["trl"]


def same(ours_T: np.ndarray, theirs: np.ndarray) -> None:
    """Groups of equal scores leave the oracles a rounding error over an epsilon of 1e-6."""
    np.testing.assert_allclose(ours_T, theirs, rtol=1e-6, atol=1e-9)


def scores(batch: Padded) -> np.ndarray:
    return batch.arrays["token_reward"].sum(1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BY_GROUP)
def test_verls_group_advantages(oracle: Oracle, seed: int, name: str) -> None:
    batch = random_batch(seed)
    score_R, group_R = scores(batch), batch.arrays["group"]
    ours_R = BY_GROUP[name](score_R, Groups.of(score_R, group_R), VERL)
    same(ours_R[batch.row_T], oracle[f"{seed}/verl advantage {name}/value"][batch.mask_BL])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BY_GROUP)
def test_trls_group_advantages(oracle: Oracle, seed: int, name: str) -> None:
    """One of the batches has groups of one."""
    score = random_batch(seed).arrays["even_score"]
    group_R = np.repeat(np.arange(len(score)), score.shape[1])
    ours_R = BY_GROUP[name](score.ravel(), Groups.of(score.ravel(), group_R), TRL)
    same(ours_R.reshape(score.shape), oracle[f"{seed}/trl advantage {name}/value"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
def test_verls_gae_carries_through_tool_tokens(oracle: Oracle, seed: int, gamma: float, lam: float) -> None:
    batch = random_batch(seed)
    reward_T = outcome_rewards(scores(batch), batch.row_T)
    np.testing.assert_array_equal(reward_T, batch.flat("token_reward"))
    advantage_T, return_T = gae(reward_T, batch.flat("old_value"), batch.row_T, gamma, lam)
    same(return_T, oracle[f"{seed}/verl gae {gamma} returns/value"][batch.mask_BL])
    same(whiten(advantage_T), oracle[f"{seed}/verl gae {gamma}/value"][batch.mask_BL])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_verls_reinforce_plus_plus(oracle: Oracle, seed: int, gamma: float) -> None:
    batch = random_batch(seed)
    ours_T = whiten(returns_to_go(batch.flat("token_reward"), batch.row_T, gamma))
    same(ours_T, oracle[f"{seed}/verl reinforce_plus_plus {gamma}/value"][batch.mask_BL])
    if gamma == 1.0:
        same(whiten(scores(batch)[batch.row_T]), ours_T)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_reinforce_plus_plus_with_baseline(oracle: Oracle, seed: int) -> None:
    batch = random_batch(seed)
    score_R = scores(batch)
    centred_R = centred(score_R, Groups.of(score_R, batch.arrays["group"]), VERL)
    same(whiten(centred_R[batch.row_T]), oracle[f"{seed}/verl reinforce_plus_plus_baseline/value"][batch.mask_BL])


def test_trls_soft_overlong_punishment(oracle: Oracle) -> None:
    same(soft_overlong(np.arange(26), 20, 8), oracle["0/trl soft overlong/value"])
