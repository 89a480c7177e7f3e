"""Optimizer steps: gradients of the formulas, metrics, and exact continuation of the learner's state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_helpers import in_parts, learner, random_rows, small_model
from written_out import DEFINITIONS, SETTINGS, written_out

from rillflow.errors import CheckpointError
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.algorithms.common import ratio
from rillflow.trainer.batches import Rows
from rillflow.trainer.graph.worker import Worker

METRICS = {
    "loss", "clip_low", "clip_high", "approx_kl", "ratio_mean", "ratio_max", "ess", "entropy", "grad_norm", "updates",
    "reward_mean", "reward_std", "advantage_mean", "advantage_std", "response_length", "truncated", "zero_variance",
    "staleness_mean", "staleness_max", "tokens", "trained_tokens", "samples", "tokens_per_second", "lr", "skipped",
    "parts", "replayed_fraction", "mfu",
    # The tokens of these rows are of no version that the trainer is at: only the stale ones are compared.
    "consistency/tokens", "consistency/stale_tokens", "consistency/stale_mean", "consistency/stale_p99",
    "consistency/stale_max", "consistency/stale_ratio", "consistency/stale_shift",
}  # fmt: skip
OWN = {
    "m2po": {"m2", "m2_clip_low", "m2_clip_high"},
    "ppo": {
        "value_loss", "value_mean", "return_mean", "explained_variance", "value_clip", "critic_grad_norm", "critic_lr",
        "critic_skipped",
    },
}  # fmt: skip


def names(metrics: dict[str, float]) -> set[str]:
    """Without the nodes' times."""
    return {name for name in metrics if not name.startswith("node_")}


def same(one: Worker, other: Worker) -> bool:
    """Weights and moments; a skipped update counts as one that was made."""
    mine, theirs = one.masters() | one.moments(), other.masters() | other.moments()
    return set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in set(mine) - {"updates"})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_raise_the_probability_of_what_was_rewarded(algorithm: str) -> None:
    """Measured under the plain surrogate, for all of them."""
    rows = random_rows(1)
    model = small_model()
    judge = learner(model, algorithm="dapo", clip_low=100.0, clip_high=100.0, lr=1e-30, weight_decay=0.0)
    trained = learner(model, algorithm=algorithm, lr=0.03, **SETTINGS.get(algorithm, {}))
    before = judge.step([rows])["loss"]
    first = trained.step([rows])
    for _ in range(4):
        trained.step([rows])
    assert names(first) == METRICS | OWN.get(algorithm, set())
    assert judge.step([rows])["loss"] < before - 0.05


def test_metrics_of_an_on_policy_batch() -> None:
    """Fed the model's own log-probs, every ratio is one."""
    rows = random_rows(2)
    model = small_model()
    own = learner(model)
    with torch.no_grad():
        old_N = np.zeros_like(rows.old_N)
        for start, length in zip(rows.start_R, rows.length_R, strict=True):
            ids = torch.from_numpy(rows.tokens_N[start : start + length].astype(np.int64))
            new = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
            old_N[start + 1 : start + length] = new[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    metrics = own.step([replace(rows, old_N=old_N)])
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert (metrics["clip_low"], metrics["clip_high"]) == (0, 0)
    assert metrics["tokens"] == rows.length_R.sum()
    assert metrics["trained_tokens"] == rows.mask_N.sum()
    assert metrics["reward_mean"] == pytest.approx(rows.reward_R.mean())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parts_and_micro_batches_change_nothing_but_rounding(algorithm: str) -> None:
    settings = {"algorithm": algorithm, "overlong_filter": True, **SETTINGS.get(algorithm, {})}
    one = learner(micro_tokens=10_000, **settings).step([random_rows(3)])
    other = learner(micro_tokens=20, **settings).step(in_parts(3, (4, 1, 7)))
    assert names(one) == METRICS | OWN.get(algorithm, set())
    for name in names(one) - {"tokens_per_second", "parts", "mfu"}:
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_the_variant_of_m2po_that_masks_says_how_much_it_kept() -> None:
    metrics = learner(algorithm="m2po", m2_variant="mask").step([random_rows(3)])
    assert names(metrics) == METRICS | {"m2", "m2_kept"}
    assert metrics["clip_low"] + metrics["clip_high"] >= 1 - metrics["m2_kept"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "m2po", "reinforce_plus_plus"])
def test_only_what_needs_the_whole_batch_waits_for_it(algorithm: str) -> None:
    """Parts are leased while the ones before them are trained on, wherever that is possible."""
    events: list[str] = []

    def parts() -> Iterator[Rows]:
        for rows in in_parts(3, (6, 6)):
            events.append("part")
            yield rows

    learner(algorithm=algorithm, micro_tokens=10_000).step(parts(), lambda: events.append("micro"))
    assert (events[:2] == ["part", "part"]) is (algorithm != "grpo")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
def test_bf16_runs_close_to_fp32_and_keeps_fp32_masters() -> None:
    rows = random_rows(3)
    full, half = learner(), learner(dtype="bf16")
    one, other = full.step([rows]), half.step([rows])
    assert other["loss"] == pytest.approx(one["loss"], rel=0.1, abs=0.05)
    assert one["loss"] != other["loss"]
    state = half.masters() | half.moments()
    assert {tensor.dtype for name, tensor in state.items() if name != "updates"} == {torch.float32}


def test_weights_are_published_in_the_asked_dtype_with_ties_kept() -> None:
    weights = learner().weights(torch.bfloat16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_the_overlong_filter_trains_nothing_of_truncated_rows() -> None:
    rows = random_rows(5)
    keep = ~rows.truncated_R
    assert 0 < keep.sum() < len(keep)
    filtered, by_hand = learner(algorithm="dapo", overlong_filter=True), learner(algorithm="dapo")
    metrics = filtered.step([rows])
    by_hand.step([rows.masked(keep)])
    assert same(filtered, by_hand)
    assert metrics["trained_tokens"] < rows.mask_N.sum()
    assert metrics["response_length"] == rows.trained_R.mean()


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "m2po", "reinforce_plus_plus"])
def test_a_batch_that_trains_nothing_changes_nothing(algorithm: str) -> None:
    rows = random_rows(5)
    idle, before = learner(overlong_filter=True, algorithm=algorithm), learner()
    metrics = idle.step([replace(rows, truncated_R=np.ones_like(rows.truncated_R))])
    assert metrics["skipped"] == 1
    assert idle.steps == 1
    assert same(idle, before)


def test_gradients_that_are_not_finite_are_not_applied() -> None:
    rows = random_rows(5)
    model = small_model()
    broken, before = learner(model), learner()
    hook = next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    metrics = broken.step([rows])
    assert metrics["skipped"] == 1
    assert same(broken, before)
    assert "grad_norm" not in metrics
    hook.remove()
    assert broken.step([rows])["skipped"] == 0


class Enough(Exception):
    """An exception that ends the step."""


@pytest.mark.parametrize("algorithm", ["grpo", "m2po"])
@pytest.mark.parametrize("checks", [0, 2, 5])
def test_an_abandoned_step_changes_nothing(checks: int, algorithm: str) -> None:
    """At once, between two micro-batches or just before the update."""
    rows = random_rows(6)
    left = iter([None] * checks)

    def check() -> None:
        if next(left, Enough) is Enough:
            raise Enough

    stopped, before = (learner(micro_tokens=20, algorithm=algorithm) for _ in range(2))
    with pytest.raises(Enough):
        stopped.step([rows], check)
    assert same(stopped, before)
    stopped.step([rows])
    before.step([rows])
    assert same(stopped, before)
    assert stopped.steps == 1


def test_a_part_that_does_not_come_abandons_the_step() -> None:
    def parts() -> Iterator[Rows]:
        yield random_rows(6)
        raise Enough

    broken, before = learner(), learner()
    with pytest.raises(Enough):
        broken.step(parts())
    assert same(broken, before)
    broken.step([random_rows(7)])
    before.step([random_rows(7)])
    assert same(broken, before)


def test_warmup() -> None:
    rows = random_rows(7)
    warm = learner(lr=0.01, warmup_steps=4)
    assert [warm.step([rows])["lr"] for _ in range(6)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_restore_continues_bit_for_bit() -> None:
    batches = [random_rows(seed) for seed in range(6)]
    straight = learner(in_order=True, warmup_steps=5)
    for rows in batches:
        straight.step([rows])
    first = learner(in_order=True, warmup_steps=5)
    for rows in batches[:3]:
        first.step([rows])
    second = learner(small_model(seed=9), in_order=True, warmup_steps=5)
    second.restore(first.masters(), first.moments(), first.steps)
    for rows in batches[3:]:
        second.step([rows])
    assert same(straight, second)
    assert second.steps == 6


def test_restore_refuses_another_model() -> None:
    with pytest.raises(CheckpointError, match="another model"):
        learner().restore(learner(small_model(tied=False)).masters(), {}, 3)


# PPO's advantages need a critic: whole steps of it are compared with an oracle's, in tests/conformance.
NAMES = [name for name in ALGORITHMS if name != "ppo"]


def test_every_algorithm_is_defined_here() -> None:
    assert set(DEFINITIONS) == set(NAMES)


@pytest.mark.parametrize(
    ("name", "sizes", "budget"),
    [*((name, (5, 1, 6), 30) for name in NAMES), ("grpo", (12,), 10_000), ("grpo", (12,), 1), ("gspo", (12,), 1)],
)
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
