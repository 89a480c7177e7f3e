"""Our losses and their gradients are verl's and TRL's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_batches import SEEDS, Padded, random_batch

from rillflow.trainer.algorithms.common import (
    Aggregation,
    Loss,
    WholeRows,
    counting_idle,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from rillflow.trainer.algorithms.losses.cispo import CispoLoss
from rillflow.trainer.algorithms.losses.clip import Clip, ClippedLoss, value_loss
from rillflow.trainer.algorithms.losses.decoupled import decoupled
from rillflow.trainer.algorithms.losses.gspo import RowClippedLoss
from rillflow.trainer.algorithms.losses.reinforce import ReinforceLoss, row_weights, token_weights
from rillflow.trainer.algorithms.losses.sapo import SapoLoss
from rillflow.trainer.algorithms.losses.terms import KL, k3_unbounded, with_entropy_bonus
from rillflow.trainer.lm_head import Shape, _Piece, _stats

pytestmark = pytest.mark.oracle

Oracle = dict[str, np.ndarray]
CALM = [seed for seed in SEEDS if not random_batch(seed).wild]
LENGTH = 18
AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm(LENGTH),
}
CLIP = Clip(0.2, 0.28, 3.0)
PLAIN = Clip(0.2, 0.28)
NARROW = Clip(0.05, 0.08)
VERL: dict[str, Loss] = {
    "vanilla": ClippedLoss(CLIP),
    "gspo": RowClippedLoss(NARROW),
    "cispo": CispoLoss.verl(0.2, 0.28),
}
TRL: dict[str, tuple[Loss, Aggregation]] = {
    "grpo": (ClippedLoss(PLAIN), seq_mean_token_mean),
    "bnpo": (ClippedLoss(PLAIN), token_mean),
    "dapo": (ClippedLoss(PLAIN), token_mean),
    "dr_grpo": (ClippedLoss(PLAIN), seq_mean_token_sum_norm(LENGTH)),
    "grpo delta": (ClippedLoss(CLIP), seq_mean_token_mean),
    "sapo": (SapoLoss(1.0, 1.05), seq_mean_token_mean),
    "cispo": (CispoLoss.trl(1.5), token_mean),
}


def tensor(batch: Padded, name: str) -> torch.Tensor:
    return torch.from_numpy(batch.flat(name))


def tokens(batch: Padded, advantage: str = "advantage") -> WholeRows:
    new_T = tensor(batch, "new").requires_grad_()
    row_T = torch.from_numpy(batch.row_T)
    return WholeRows(new_T, tensor(batch, "old"), tensor(batch, advantage), row_T, len(batch.mask_BL))


def compare(
    oracle: Oracle, name: str, loss_T: torch.Tensor, leaf: torch.Tensor, *, how: Aggregation = token_mean
) -> None:
    """The batch's loss as the step makes it from weights and a count, and its gradient at every trained token.

    `name` begins with the seed of the batch.
    """
    batch = random_batch(int(name.split("/", 1)[0]))
    weight_T = torch.from_numpy(how.weigh(batch.trained_R)[batch.row_T])
    loss = (loss_T * weight_T).sum() / how.count(batch.trained_R)
    gradient_T = torch.autograd.grad(loss, leaf, retain_graph=True)[0].numpy()
    theirs = oracle[f"{name}/gradient"]
    np.testing.assert_allclose(loss.item(), oracle[f"{name}/value"], rtol=1e-6, err_msg=name)
    scale = np.abs(theirs).max()
    assert scale > 0
    np.testing.assert_allclose(gradient_T, theirs[batch.mask_BL], rtol=1e-6, atol=1e-9 * scale, err_msg=name)
    assert not theirs[~batch.mask_BL].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", VERL)
def test_verls_losses_under_every_aggregation(oracle: Oracle, seed: int, name: str, aggregation: str) -> None:
    batch = random_batch(seed)
    ours = tokens(batch)
    key = f"{seed}/verl {name} {aggregation}"
    compare(oracle, key, VERL[name](ours), ours.new_T, how=AGGREGATIONS[aggregation])


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_other_policy_losses(oracle: Oracle, seed: int) -> None:
    batch = random_batch(seed)
    ours = tokens(batch)
    compare(oracle, f"{seed}/verl vanilla no dual", ClippedLoss(PLAIN)(ours), ours.new_T)
    compare(oracle, f"{seed}/verl sapo", SapoLoss(1.0, 1.05)(ours), ours.new_T, how=seq_mean_token_mean)
    for level in ("token", "sequence"):
        loss_T = ReinforceLoss(2.0, level)(ours)
        compare(oracle, f"{seed}/verl reinforce {level}", loss_T, ours.new_T, how=seq_mean_token_sum)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_clip_fraction_is_the_tokens_held(oracle: Oracle, seed: int) -> None:
    low_T, high_T = ClippedLoss(PLAIN).held(tokens(random_batch(seed)))
    theirs = oracle[f"{seed}/verl vanilla clipped/value"]
    assert theirs > 0
    assert (low_T | high_T).double().mean().item() == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_truncated_importance_sampling(oracle: Oracle, seed: int) -> None:
    batch = random_batch(seed)
    ours, sampled_T = tokens(batch), tensor(random_batch(seed), "behaviour")
    weights = {
        "token": token_weights(ours.old_T, sampled_T, 2.0),
        "sequence": row_weights(ours, ours.old_T, sampled_T, 2.0),
    }
    for level, weight_T in weights.items():
        assert (weight_T == 2.0).any()
        loss_T = ClippedLoss(CLIP)(ours) * weight_T
        compare(oracle, f"{seed}/verl tis {level}", loss_T, ours.new_T)


@pytest.mark.parametrize("seed", SEEDS)
def test_decoupled_ppo_is_verls_clip_around_old_under_free_weights(oracle: Oracle, seed: int) -> None:
    batch = random_batch(seed)
    ours = tokens(batch)
    sampled = WholeRows(ours.new_T, tensor(batch, "behaviour"), ours.advantage_T, ours.row_T, ours.rows)
    loss_T = decoupled(sampled, ours.old_T, PLAIN, None)
    compare(oracle, f"{seed}/verl decoupled", loss_T, ours.new_T)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_distances_values_and_entropies(oracle: Oracle, seed: int) -> None:
    batch = random_batch(seed)
    ours = tokens(batch)
    for kind in ("k1", "k2", "k3"):
        kl_T = KL[kind](ours.new_T, tensor(batch, "reference"))
        compare(oracle, f"{seed}/verl {kind}", kl_T, ours.new_T)
    value_T = tensor(batch, "value").requires_grad_()
    for how in ("token-mean", "seq-mean-token-mean"):
        loss_T = value_loss(value_T, tensor(batch, "old_value"), tensor(batch, "return"), 0.5)
        compare(oracle, f"{seed}/verl value {how}", loss_T, value_T, how=AGGREGATIONS[how])
    logits_TV = tensor(batch, "logits").requires_grad_()
    compare(oracle, f"{seed}/verl entropy", entropies(logits_TV), logits_TV, how=seq_mean_token_mean)


def entropies(logits_TV: torch.Tensor) -> torch.Tensor:
    """As the trainer's head has them."""
    count = len(logits_TV)
    stats, _ = _stats(_Piece(logits_TV, None, torch.zeros(count, dtype=torch.long), torch.ones(count)), Shape())
    return stats.entropy_T


@pytest.mark.parametrize("seed", CALM)
@pytest.mark.parametrize("name", TRL)
def test_trls_losses(oracle: Oracle, seed: int, name: str) -> None:
    batch = random_batch(seed)
    ours = tokens(batch)
    loss, how = TRL[name]
    compare(oracle, f"{seed}/trl {name}", loss(ours), ours.new_T, how=how)


@pytest.mark.parametrize("seed", CALM)
@pytest.mark.parametrize(("name", "how"), [("gspo", seq_mean_token_mean), ("luspo", seq_mean_token_sum)])
def test_trls_row_ratios(oracle: Oracle, seed: int, name: str, how: Aggregation) -> None:
    """With one advantage a row, as both define it: only then have verl's form and TRL's the same gradient."""
    ours = tokens(random_batch(seed), "row_advantage")
    compare(oracle, f"{seed}/trl {name}", RowClippedLoss(NARROW)(ours), ours.new_T, how=how)


@pytest.mark.parametrize("seed", CALM)
def test_trls_terms_on_top(oracle: Oracle, seed: int) -> None:
    batch = random_batch(seed)
    ours = tokens(batch)
    clipped_T = ClippedLoss(PLAIN)(ours)
    weight_T = token_weights(ours.old_T, tensor(batch, "behaviour"), 2.0)
    compare(oracle, f"{seed}/trl tis", clipped_T * weight_T, ours.new_T)
    kl_T = k3_unbounded(ours.new_T, tensor(batch, "reference"))
    compare(oracle, f"{seed}/trl kl", clipped_T + 0.1 * kl_T, ours.new_T)
    entropy_T = tensor(batch, "entropy").requires_grad_()
    with_bonus_T = with_entropy_bonus(clipped_T, entropy_T, 0.05)
    compare(oracle, f"{seed}/trl entropy", with_bonus_T, entropy_T)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_trl_counts_rows_that_train_nothing_and_so_can_we(oracle: Oracle, name: str) -> None:
    """Only for log-ratios within our bound, which TRL does not have."""
    seed = next(seed for seed in SEEDS if random_batch(seed).wild)
    batch = random_batch(seed)
    ours = tokens(batch)
    loss, how = TRL[name]
    weight_T = torch.from_numpy(how.weigh(batch.trained_R)[batch.row_T])
    loss = (loss(ours) * weight_T).sum() / counting_idle(how).count(batch.trained_R)
    gradient_T = torch.autograd.grad(loss, ours.new_T)[0].numpy()
    theirs = oracle[f"{seed}/trl {name}/gradient"]
    assert (batch.trained_R == 0).any()
    within_T = np.abs(batch.flat("new") - batch.flat("old")) < 20
    np.testing.assert_allclose(gradient_T[within_T], theirs[batch.mask_BL][within_T], rtol=1e-6, atol=1e-12)
