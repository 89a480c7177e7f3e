"""The options of algorithms in a recipe, and their effect."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms import ADVANTAGES, ALGORITHMS, convention_of
from rillflow.trainer.algorithms.advantages import CONVENTIONS, standardise, whiten
from rillflow.trainer.algorithms.common import WholeRows, seq_mean_token_mean, token_mean
from rillflow.trainer.algorithms.losses.cispo import CispoLoss
from rillflow.trainer.algorithms.losses.clip import Clip, ClippedLoss
from rillflow.trainer.algorithms.losses.m2po import M2poClip, M2poMask
from rillflow.trainer.algorithms.losses.reinforce import ReinforceLoss
from rillflow.trainer.algorithms.losses.sapo import SapoLoss


def loss(**settings: Any) -> object:
    config = TrainerConfig(**settings)
    return ALGORITHMS[config.algorithm](config).loss


def choices(field: str) -> set[str]:
    annotation = TrainerConfig.model_fields[field].annotation
    found = [part for part in (annotation, *get_args(annotation)) if str(part).startswith("typing.Literal")]
    return set(get_args(found[0]))


def test_the_recipe_knows_every_name() -> None:
    assert choices("algorithm") == set(ALGORITHMS)
    assert choices("advantage") == set(ADVANTAGES)


def test_options_win_over_the_algorithms_own() -> None:
    assert loss(algorithm="dapo", clip_low=0.1, clip_high=0.4) == ClippedLoss(Clip(0.1, 0.4, 10.0))
    assert loss(algorithm="dapo") == ClippedLoss(Clip(0.2, 0.28, 10.0))
    assert loss(clip_dual=5) == ClippedLoss(Clip(0.2, 0.2, 5.0))
    assert loss(algorithm="sapo", sapo_tau=(2.0, 3.0)) == SapoLoss(2.0, 3.0)
    assert loss(algorithm="m2po", m2_threshold=0.002) == M2poClip(0.002)
    assert loss(algorithm="m2po", m2_variant="mask", clip_low=0.3) == M2poMask(0.01, Clip(0.3, 0.2))
    assert loss(algorithm="reinforce", weight_level="sequence") == ReinforceLoss(2.0, "sequence")


def test_the_dual_clip_can_be_off_and_trl_has_none() -> None:
    off = ClippedLoss(Clip(0.2, 0.2, None))
    assert loss(clip_dual="off") == loss(clip_dual=False) == loss(convention="trl") == off
    assert loss(convention="trl", clip_dual=4) == ClippedLoss(Clip(0.2, 0.2, 4.0))
    assert loss(algorithm="m2po", clip_dual="off") == M2poClip(0.01)


def test_trls_loss_of_a_token_that_became_likely_is_not_bounded() -> None:
    """With A = -1 and a log-ratio of 2, verl's dual clip gives a loss of 3 without a gradient."""
    for settings, value, slope in (({"convention": "trl"}, math.exp(2), math.exp(2)), ({}, 3.0, 0.0)):
        new_T = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        old_T = torch.tensor([-3.0], dtype=torch.float64)
        of_tokens: Any = loss(**settings)
        loss_T = of_tokens(WholeRows(new_T, old_T, torch.tensor([-1.0]), torch.tensor([0]), 1))
        loss_T.sum().backward()
        assert new_T.grad is not None
        assert (loss_T.item(), new_T.grad.item()) == pytest.approx((value, slope))


def test_a_sample_that_is_alone_in_its_group_is_worth_nothing_unless_the_recipe_says_so() -> None:
    assert {convention_of(TrainerConfig(convention=name)).lone_keeps for name in CONVENTIONS} == {False}
    assert convention_of(TrainerConfig(lone_rows="reward")).lone_keeps


def test_cispos_bounds_are_whose_convention_it_is() -> None:
    assert loss(algorithm="cispo", clip_high=0.3) == CispoLoss(0.0, 1.3)
    assert loss(algorithm="cispo", clip_high=4.0, convention="trl") == CispoLoss(0.0, 4.0)


def test_parts_can_be_exchanged() -> None:
    whitened = TrainerConfig(algorithm="cispo", advantage="reinforce_plus_plus", aggregation="seq_mean_token_mean")
    algorithm = ALGORITHMS["cispo"](whitened)
    assert algorithm.whiten is not None
    assert algorithm.aggregation is seq_mean_token_mean
    own = ALGORITHMS["cispo"](TrainerConfig(algorithm="cispo"))
    assert own.whiten is None
    assert own.aggregation is token_mean


def test_astraflows_advantages_are_standardised_over_the_batch() -> None:
    config = TrainerConfig(algorithm="m2po", advantage="grpo_whitened", convention="astraflow")
    assert ALGORITHMS["m2po"](config).whiten is standardise
    assert ALGORITHMS["m2po"](config.model_copy(update={"convention": "verl"})).whiten is whiten


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "sapo", "clip_low": 0.1}, "sapo has no clip_low"),
        ({"algorithm": "grpo", "m2_threshold": 0.1}, "option of m2po"),
        ({"algorithm": "m2po", "clip_high": 0.1}, "m2_variant=mask"),
        ({"algorithm": "dr_grpo"}, "needs norm_tokens"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "needs norm_tokens"),
        ({"norm_tokens": 32}, "norm_tokens is an option of the aggregation seq_mean_token_sum_norm"),
        ({"clip_dual": 0.5}, "greater than 1"),
        ({"algorithm": "ppo2"}, "Input should be"),
    ],
)
def test_options_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainerConfig(**settings)
