"""Losses and gradients of the learner against the formulas written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from trainer_helpers import in_parts, learner, random_rows, small_model
from written_out import DEFINITIONS, SETTINGS, written_out

from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.algorithms.common import ratio

# PPO's advantages need a critic: whole steps of it are compared with an oracle's, in tests/conformance.
NAMES = [name for name in ALGORITHMS if name != "ppo"]


def test_every_algorithm_is_defined_here() -> None:
    assert set(DEFINITIONS) == set(NAMES)


@pytest.mark.parametrize(("sizes", "budget"), [((12,), 10_000), ((5, 1, 6), 30), ((12,), 1)])
@pytest.mark.parametrize("name", NAMES)
def test_the_learners_gradient_is_that_of_the_formula(name: str, sizes: tuple[int, ...], budget: int) -> None:
    """Scaled over the whole batch before it would be clipped, whatever the parts and micro-batches."""
    model = small_model()
    loss = written_out(model, random_rows(4), name)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    trained = learner(model, algorithm=name, micro_tokens=budget, max_grad_norm=1e9, **SETTINGS.get(name, {}))
    metrics = trained.step(in_parts(4, sizes))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        # fp32 sums over tokens in another order: errors are of the size of the whole gradient's last digits.
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
