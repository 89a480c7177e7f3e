"""Losses and gradients against the formulas written out token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_helpers import learner, random_rows, small_model

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.algorithms.common import Clip, clipped_surrogate, group_advantage, ratio
from rillflow.trainer.batches import Rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import Plan, collate, input_length, pack

CLIPS = {"grpo": (0.2, 0.2, 3.0), "dapo": (0.2, 0.28, 10.0)}


def written_out(model: torch.nn.Module, rows: Rows, name: str) -> torch.Tensor:
    """The whole loss by its definition: one row, one token at a time."""
    low, high, dual = CLIPS[name]
    per_row: list[torch.Tensor] = []
    tokens = 0
    for r, start in enumerate(rows.start_R):
        ids = torch.from_numpy(rows.tokens_N[start : start + rows.length_R[r]].astype(np.int64))
        new = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        n = rows.group_size_R[r]
        std = rows.group_std_R[r] * math.sqrt(n / (n - 1))
        advantage = (rows.reward_R[r] - rows.group_mean_R[r]) / (std + 1e-6)
        losses = []
        for t in range(1, len(ids)):
            if rows.mask_N[start + t]:
                r_t = torch.exp(torch.clamp(new[t - 1, ids[t]] - float(rows.old_N[start + t]), -20, 20))
                loss = torch.max(-advantage * r_t, -advantage * torch.clamp(r_t, 1 - low, 1 + high))
                losses.append(torch.clamp(loss, max=-advantage * dual) if advantage < 0 else loss)
        tokens += len(losses)
        per_row.append(torch.stack(losses).mean() if name == "grpo" else torch.stack(losses).sum())
    return torch.stack(per_row).mean() if name == "grpo" else torch.stack(per_row).sum() / tokens


def ours(model: torch.nn.Module, rows: Rows, name: str, budget: int) -> torch.Tensor:
    """The sum over micro-batches, in the precision of the model."""
    algorithm = ALGORITHMS[name](TrainerConfig())
    forward = PolicyForward(model)
    forward_logits = forward._logits
    aggregation = algorithm.aggregation
    plan = Plan(rows, input_length(rows), algorithm.advantage(rows), aggregation.weigh(rows.trained_R))
    total = torch.zeros((), dtype=torch.float64)
    for index_B in pack(plan.input_R, budget):
        micro = collate(plan, index_B, torch.device("cpu"))
        of_T = np.repeat(index_B, rows.trained_R[index_B])
        advantage_T = torch.from_numpy(plan.advantage_R[of_T])
        weight_T = torch.from_numpy(plan.weight_R[of_T])
        new_T = torch.log_softmax(forward_logits(micro), -1).gather(-1, micro.target_T[:, None]).squeeze(-1)
        total = total + (algorithm.loss(new_T, micro.old_T.double(), advantage_T) * weight_T).sum()
    return total / aggregation.count(rows.trained_R)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_follow_the_formula_whatever_the_split(name: str, seed: int) -> None:
    model = small_model(seed).double()
    rows = random_rows(seed)
    expected = written_out(model, rows, name)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for budget in (1, 30, 10_000):
        loss = ours(model, rows, name, budget)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        for mine, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_learners_gradient_is_that_of_the_formula(name: str) -> None:
    """Scaled over the whole batch before it would be clipped, whatever the parts and micro-batches."""
    model, rows = small_model(), random_rows(4)
    expected = torch.autograd.grad(written_out(model, rows, name), list(model.parameters()))
    trained = learner(model, algorithm=name, micro_tokens=30, max_grad_norm=1e9)
    metrics = trained.step([rows])
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-5)
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_clipping_acts_on_these_batches() -> None:
    """The comparison above means little if no ratio ever leaves the clip range."""
    rows = random_rows(0)
    old_T = torch.from_numpy(rows.old_N[rows.mask_N])
    ratio_T = ratio(torch.full_like(old_T, -3.4), old_T)
    assert (ratio_T > 1.28).any()
    assert (ratio_T < 0.8).any()


def test_clipped_surrogate_by_hand() -> None:
    ratios = torch.tensor([0.5, 0.5, 1.5, 1.5, 9.0, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 2.0])
    expected = torch.tensor([-0.5, 0.8, -1.28, 1.5, 3.0, -2.2])
    torch.testing.assert_close(clipped_surrogate(ratios, advantages, Clip(0.2, 0.28, 3.0)), expected)


def test_ratio_is_bounded() -> None:
    assert ratio(torch.tensor([0.0]), torch.tensor([-1e4])).item() == pytest.approx(math.exp(20))
    assert ratio(torch.tensor([-1e4]), torch.tensor([0.0])).item() == pytest.approx(math.exp(-20))


def test_advantage_is_verls() -> None:
    """Unbiased std plus 1e-6; the statistics in the batch are the population's."""
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    rows = random_rows(0, groups=1, size=4)
    rows = replace(
        rows,
        reward_R=rewards,
        group_mean_R=np.full(4, rewards.mean()),
        group_std_R=np.full(4, rewards.std()),
    )
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(group_advantage(rows), expected, rtol=1e-12)


def test_a_singleton_keeps_its_reward_and_equal_rewards_give_zero() -> None:
    rows = random_rows(0, groups=1, size=2)
    single = replace(
        rows, reward_R=np.array([0.7, 0.3]), group_mean_R=np.array([0.7, 0.3]), group_std_R=np.zeros(2),
        group_size_R=np.array([1, 1]),
    )  # fmt: skip
    np.testing.assert_allclose(group_advantage(single), [0.7, 0.3], rtol=2e-6)
    equal = replace(single, reward_R=np.ones(2), group_mean_R=np.ones(2), group_size_R=np.array([2, 2]))
    np.testing.assert_array_equal(group_advantage(equal), [0.0, 0.0])


def test_aggregation_weights() -> None:
    trained_R = np.array([2, 0, 6])
    grpo, dapo = (ALGORITHMS[name](TrainerConfig()).aggregation for name in ("grpo", "dapo"))
    np.testing.assert_allclose(dapo.weigh(trained_R)[[0, 2]] / dapo.count(trained_R), 1 / 8)
    np.testing.assert_allclose(grpo.weigh(trained_R)[[0, 2]] / grpo.count(trained_R), [1 / 4, 1 / 12])


def test_clip_settings_win_over_the_algorithms_own() -> None:
    config = TrainerConfig(clip_low=0.1, clip_high=0.4)
    assert (ALGORITHMS["dapo"](config).clip.low, ALGORITHMS["dapo"](config).clip.high) == (0.1, 0.4)
    assert ALGORITHMS["dapo"](TrainerConfig()).clip.high == 0.28
