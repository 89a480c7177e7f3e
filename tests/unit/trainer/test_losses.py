"""Losses and gradients of the learner against the formulas written out token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_helpers import in_parts, learner, random_rows, small_model
from written_out import DEFINITIONS, SETTINGS, written_out

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.algorithms.common import BatchLoss, ratio
from rillflow.trainer.batches import Rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import MicroBatch, Plan, collate, input_length, pack
from rillflow.trainer.whole import joined, of_micro, whitened

CPU = torch.device("cpu")


class DoubleForward(PolicyForward):
    """In the precision of the model."""

    def new(self, micro: MicroBatch) -> torch.Tensor:
        all_TV = torch.log_softmax(self._logits(micro), -1)
        return all_TV.gather(-1, micro.target_T[:, None]).squeeze(-1)


def ours(model: torch.nn.Module, rows: Rows, name: str, budget: int) -> torch.Tensor:
    """The sum over micro-batches, in double precision."""
    algorithm = ALGORITHMS[name](TrainerConfig(algorithm=name, **SETTINGS.get(name, {})))
    how = algorithm.aggregation
    plan = Plan(rows, input_length(rows), algorithm.advantage(rows), how.weigh(rows.trained_R))
    if algorithm.whiten is not None:
        (plan,) = whitened([plan], algorithm.whiten)
    forward = DoubleForward(model)
    micros = []
    for index_B in pack(plan.input_R, budget):
        of_T = np.repeat(index_B, rows.trained_R[index_B])
        micro = collate(plan, index_B, CPU)
        exact = replace(
            micro, old_T=micro.old_T.double(), advantage_T=torch.from_numpy(plan.advantage_R[of_T]),
            weight_T=torch.from_numpy(plan.weight_R[of_T]),
        )  # fmt: skip
        micros.append((exact, of_micro(exact, forward.new(exact))))
    loss = algorithm.loss
    if isinstance(loss, BatchLoss):
        loss, _ = loss.fit(joined([tokens for _, tokens in micros], CPU))
    total = sum((loss(tokens) * micro.weight_T).sum() for micro, tokens in micros)
    return torch.as_tensor(total) / how.count(rows.trained_R)


def test_every_algorithm_is_defined_here() -> None:
    assert set(DEFINITIONS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_follow_the_formula_whatever_the_split(name: str, seed: int) -> None:
    model = small_model(seed).double()
    rows = random_rows(seed)
    expected = written_out(model, rows, name)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for budget in (1, 30, 10_000):
        loss = ours(model, rows, name, budget)
        torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)
        for mine, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("sizes", [(12,), (5, 1, 6)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_learners_gradient_is_that_of_the_formula(name: str, sizes: tuple[int, ...]) -> None:
    """Scaled over the whole batch before it would be clipped, whatever the parts and micro-batches."""
    model = small_model()
    expected = torch.autograd.grad(written_out(model, random_rows(4), name), list(model.parameters()))
    trained = learner(model, algorithm=name, micro_tokens=30, max_grad_norm=1e9, **SETTINGS.get(name, {}))
    metrics = trained.step(in_parts(4, sizes))
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-5 * max(1.0, float(norm)))
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_clipping_acts_on_these_batches() -> None:
    """The comparison above means little if no ratio ever leaves the clip range."""
    rows = random_rows(0)
    old_T = torch.from_numpy(rows.old_N[rows.mask_N])
    ratio_T = ratio(torch.full_like(old_T, -3.4), old_T)
    assert (ratio_T > 1.28).any()
    assert (ratio_T < 0.8).any()


def test_ratio_is_bounded() -> None:
    assert ratio(torch.tensor([0.0]), torch.tensor([-1e4])).item() == pytest.approx(math.exp(20))
    assert ratio(torch.tensor([-1e4]), torch.tensor([0.0])).item() == pytest.approx(math.exp(-20))
