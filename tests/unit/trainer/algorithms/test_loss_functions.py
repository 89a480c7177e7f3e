"""Losses by hand. tests/conformance/oracle compares random batches with verl and TRL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer_threads import as_peers
from rillflow.trainer.algorithms.common import (
    WholeRows,
    counting_idle,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from rillflow.trainer.algorithms.losses.cispo import CispoLoss
from rillflow.trainer.algorithms.losses.clip import Clip, ClippedLoss, clipped_surrogate
from rillflow.trainer.algorithms.losses.decoupled import DecoupledLoss, decoupled
from rillflow.trainer.algorithms.losses.gspo import RowClippedLoss, row_ratio
from rillflow.trainer.algorithms.losses.m2po import M2poClip, M2poMask, highest_kept
from rillflow.trainer.algorithms.losses.reinforce import ReinforceLoss
from rillflow.trainer.algorithms.losses.sapo import SapoLoss
from rillflow.trainer.algorithms.losses.terms import k3, k3_unbounded
from rillflow.trainer.parallel import Peers


def tokens(log_ratios: list[float], advantages: list[float], rows: list[int] | None = None) -> WholeRows:
    """With old log-probs of -3."""
    of = rows or list(range(len(log_ratios)))
    log_ratio_T = torch.tensor(log_ratios, dtype=torch.float64)
    advantage_T = torch.tensor(advantages, dtype=torch.float64)
    old_T = torch.full_like(log_ratio_T, -3.0)
    return WholeRows(old_T + log_ratio_T, old_T, advantage_T, torch.tensor(of), max(of) + 1)


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def test_clipped_surrogate_by_hand() -> None:
    ratios = torch.tensor([0.5, 0.5, 1.5, 1.5, 9.0, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 2.0])
    expected = torch.tensor([-0.5, 0.8, -1.28, 1.5, 3.0, -2.2])
    torch.testing.assert_close(clipped_surrogate(ratios, advantages, Clip(0.2, 0.28, 3.0)), expected)
    expected[4] = 9.0
    torch.testing.assert_close(clipped_surrogate(ratios, advantages, Clip(0.2, 0.28)), expected)


def test_what_the_clip_holds() -> None:
    low_T, high_T = ClippedLoss(Clip(0.2, 0.2)).held(tokens(logs(0.5, 0.5, 1.5, 1.5, 1.0), [1, -1, 1, -1, 1]))
    assert low_T.tolist() == [False, True, False, False, False]
    assert high_T.tolist() == [False, False, True, False, False]


def test_a_row_is_clipped_as_a_whole() -> None:
    """Ratios 2 and 1/2 have the geometric mean 1: neither is clipped. Two of 1.5 are, both."""
    batch = tokens(logs(2.0, 0.5, 1.5, 1.5), [1, 1, 1, 1], [0, 0, 1, 1])
    torch.testing.assert_close(row_ratio(batch), torch.tensor([1, 1, 1.5, 1.5], dtype=torch.float64))
    assert RowClippedLoss(Clip(0.2, 0.2)).held(batch)[1].tolist() == [False, False, True, True]


def test_cispo_keeps_a_gradient_where_ppo_cuts_it() -> None:
    batch = tokens(logs(2.0), [1.0])
    new_T = batch.new_T.requires_grad_()
    assert torch.autograd.grad(ClippedLoss(Clip(0.2, 0.2))(batch).sum(), new_T)[0].item() == 0
    assert torch.autograd.grad(CispoLoss.verl(0.2, 0.2)(batch).sum(), new_T)[0].item() == pytest.approx(-1.2)
    assert torch.autograd.grad(CispoLoss.trl(1.5)(batch).sum(), new_T)[0].item() == pytest.approx(-1.5)


def test_sapos_gate_has_the_slope_of_the_ratio_at_one_and_closes_beyond() -> None:
    batch = tokens(logs(1.0, 20.0), [1.0, 1.0])
    new_T = batch.new_T.requires_grad_()
    at_one, beyond = torch.autograd.grad(SapoLoss(1.0, 1.05)(batch).sum(), new_T)[0].tolist()
    assert at_one == pytest.approx(-1.0)
    assert abs(beyond) < 1e-5


def test_truncation_of_tokens_and_of_rows() -> None:
    batch = tokens(logs(3.0, 0.5, 0.25), [1, 1, 1], [0, 0, 1])
    torch.testing.assert_close(ReinforceLoss(2.0).weights(batch), torch.tensor([2.0, 0.5, 0.25]).double())
    torch.testing.assert_close(ReinforceLoss(2.0, "sequence").weights(batch), torch.tensor([1.5, 1.5, 0.25]).double())
    assert ReinforceLoss(2.0).held(batch)[1].tolist() == [True, False, False]


def test_decoupled_around_the_policy_that_sampled_is_plain_ppo() -> None:
    batch = tokens(logs(0.5, 1.5, 1.1), [-1, 1, 2])
    clip = Clip(0.2, 0.2)
    torch.testing.assert_close(decoupled(batch, batch.old_T, clip, 5.0), ClippedLoss(clip)(batch))


def test_decoupled_drops_what_is_too_far_away() -> None:
    batch = tokens(logs(2.0, 6.0), [1, 1])
    torch.testing.assert_close(DecoupledLoss(Clip(0.2, 0.2), 5.0)(batch), torch.tensor([-2.0, 0.0]).double())
    assert DecoupledLoss(Clip(0.2, 0.2), 5.0).held(batch)[1].tolist() == [False, True]


def test_the_bound_on_k3_is_verls() -> None:
    new_T, reference_T = torch.tensor([-5.0, -1.0]), torch.tensor([0.0, -1.5])
    assert k3(new_T, reference_T)[0].item() == 10
    assert k3_unbounded(new_T, reference_T)[0].item() == pytest.approx(math.exp(5) - 6)
    torch.testing.assert_close(k3(new_T, reference_T)[1], k3_unbounded(new_T, reference_T)[1])


# ---------------------------------------------------------------- M2PO

MOMENTS = st.lists(st.sampled_from([0.0, 1e-30, 0.001, 0.004, 0.02, 0.1, 3.0, 900.0]) | st.floats(0, 10), min_size=1)


def test_the_highest_moment_that_may_stay() -> None:
    moments = torch.tensor([4.0, 0.0, 1.0, 9.0])
    assert highest_kept(moments, 100.0).item() == 9
    assert highest_kept(moments, 3.0).item() == 4
    assert highest_kept(moments, 0.6).item() == 1
    assert highest_kept(moments[[0, 2]], 0.5).item() == 1, "none is under it: the smallest stays"


def test_m2po_is_wide_where_the_batch_is_near() -> None:
    """Only tokens count that the clip could hold: those that moved with their advantage."""
    for batch in (tokens([0.05, -0.05], [1, -1]), tokens([3.0, -3.0], [-1, 1]), tokens([0.0], [1])):
        loss, values = M2poClip(0.01).fit(batch)
        assert loss.clip == Clip(0.95, 20.0)
        assert values["m2"] <= 0.01


def test_m2po_bounds_follow_the_second_moment() -> None:
    loss, values = M2poClip(0.01).fit(tokens([0.01, 0.1, -0.5, 2.0, -4.0], [1, 1, -1, 1, 1]))
    assert values["m2"] == pytest.approx((0.01**2 + 0.1**2 + 0.5**2 + 2**2) / 4)
    assert loss.clip.low == values["m2_clip_low"] == pytest.approx(1 - math.exp(-0.1), rel=1e-4)
    assert loss.clip.high == values["m2_clip_high"] == pytest.approx(math.exp(0.1) - 1, rel=1e-4)


@pytest.mark.parametrize("drift", np.linspace(0.02, 0.3, 40).tolist())
def test_m2po_does_not_clip_the_token_that_its_bounds_are_made_from(drift: float) -> None:
    """Also if log-probs are rounded once more: the order of sums differs between ranks and machines."""
    batch = tokens([drift, 2.0, 3.0], [1, 1, 1])
    loss, _ = M2poClip(drift**2 + 1e-4).fit(batch)
    assert loss.held(batch)[1].tolist() == [False, True, True]
    rounded = tokens([drift + 1e-6, 2.0, 3.0], [1, 1, 1])
    assert loss.held(rounded)[1].tolist() == [False, True, True]


def test_m2po_mask_drops_the_largest_of_all() -> None:
    batch = tokens([0.01, 0.1, -0.5, 2.0, -4.0], [1, 1, -1, 1, 1])
    loss, values = M2poMask(0.01, Clip(0.2, 0.2)).fit(batch)
    assert (loss(batch) != 0).tolist() == [True, True, False, False, False]
    assert values["m2_kept"] == pytest.approx(0.4)
    low_T, high_T = loss.held(batch)
    assert low_T.tolist() == [False, False, True, False, True]
    assert high_T.tolist() == [False, False, False, True, False]


def test_m2po_of_an_empty_batch() -> None:
    none = torch.zeros(0)
    empty = WholeRows(none, none, none, none.long(), 0)
    assert M2poClip(0.01).fit(empty)[0].clip == Clip(0.95, 20.0)
    assert len(M2poMask(0.01, Clip(0.2, 0.2)).fit(empty)[0](empty)) == 0


def by_definition(moments: list[float], threshold: float) -> float:
    """Sorted, the last whose mean with all smaller ones is under the threshold; else the smallest."""
    ascending = sorted(moments)
    under = [k for k in range(len(ascending)) if np.mean(ascending[: k + 1]) < threshold]
    return ascending[under[-1]] if under else ascending[0]


@given(moments=MOMENTS, threshold=st.sampled_from([0.0021, 0.01003, 0.5007]))
def test_the_highest_kept_moment_follows_its_definition(moments: list[float], threshold: float) -> None:
    found = highest_kept(torch.tensor(moments, dtype=torch.float64), threshold)
    assert found == pytest.approx(by_definition(moments, threshold), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_find_the_same_highest_moment(ranks: int) -> None:
    moment_T = torch.from_numpy(np.random.default_rng(1).gamma(0.3, 0.05, 500))
    alone = highest_kept(moment_T, 0.01)

    def work(peers: Peers) -> float:
        empty = peers.rank == ranks - 1
        return highest_kept(moment_T[:0] if empty else moment_T[peers.rank :: ranks - 1], 0.01, peers)

    assert as_peers(ranks, work) == [alone] * ranks


# ---------------------------------------------------------------- aggregation


def test_aggregations_by_hand() -> None:
    trained_R = np.array([2, 0, 6])
    shares = {
        token_mean: [1 / 8, 1 / 8],
        seq_mean_token_mean: [1 / 4, 1 / 12],
        seq_mean_token_sum: [1 / 2, 1 / 2],
        seq_mean_token_sum_norm(10): [1 / 20, 1 / 20],
    }
    for how, expected in shares.items():
        np.testing.assert_allclose(how.weigh(trained_R)[[0, 2]] / how.count(trained_R), expected)


def test_idle_rows_count_by_trls_convention_where_rows_count_at_all() -> None:
    trained_R = np.array([2, 0, 6])
    assert counting_idle(seq_mean_token_mean).count(trained_R) == 3
    assert counting_idle(seq_mean_token_sum_norm(10)).count(trained_R) == 3
    assert counting_idle(token_mean).count(trained_R) == 8
