"""Losses and gradients of supervised training equal transformers' own and what TRL writes, however rows are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lessons import Listed, fit_recipe, writer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rillflow.examples import stockroom
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.parallel import Alone
from rillflow.trainer.supervised.examples import Examples, read_examples
from rillflow.trainer.supervised.fit import Trained, assemble
from rillflow.trainer.supervised.functions import evaluate, pair_losses, pair_slopes, step_losses
from rillflow.trainer.supervised.reward_model import area_under_curve, calibration_error, correlation, ranking_of
from rillflow.weights.model_folder import model_folder

CPU = torch.device("cpu")
ROWS = {
    "sft": stockroom.demonstrations,
    "reward": stockroom.comparisons,
    "process_reward": stockroom.graded_steps,
}
Gradients = dict[str, torch.Tensor]


def lesson(task: str, count: int = 6, **changes: Any) -> tuple[Trained, Examples]:
    recipe = fit_recipe(task, **changes)
    rows = [row["payload"] for row in ROWS[task]("train", count, 4)]
    return assemble(recipe, Alone(), CPU), read_examples(Listed(rows), "", recipe, writer(), 512)


def gradients(
    trained: Trained, data: Databuffer, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, float], Gradients]:
    """What a step adds up, scaled as the update scales it. The update itself is left out."""
    found: Gradients = {}
    optimizer = trained.learner.optimizer
    assert optimizer is not None

    def update(scale: float) -> dict[str, float]:
        for name, parameter in trained.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad * scale
        return {"grad_norm": 0.0, "lr": 0.0, "skipped": 0.0}

    monkeypatch.setattr(optimizer, "update", update)
    return trained.worker.step([data]), found


def padded(data: Databuffer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, attention and what is marked, as anybody else pads them."""
    width = int(data["length_R"].max())
    tokens = torch.zeros(len(data), width, dtype=torch.long)
    attention, marked = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(data.rows.start_R.tolist(), data["length_R"].tolist(), strict=True)):
        tokens[row, :length] = torch.from_numpy(data["tokens_N"][start : start + length].astype(np.int64))
        marked[row, :length] = torch.from_numpy(data["mask_N"][start : start + length])
        attention[row, :length] = 1
    return tokens, attention, marked


def same_classifier(trained: Trained) -> Any:
    """A model of transformers with these weights."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder("tiny"), num_labels=1, dtype=torch.float32)
    model.load_state_dict(trained.model.state_dict())
    return model


def assert_same(ours: Gradients, theirs: torch.nn.Module) -> None:
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert set(ours) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("micro_tokens", [64, 8192])
def test_sft_is_transformers_own_loss(micro_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, examples = lesson("sft", trainer={"micro_tokens": micro_tokens})
    data = examples.take([4, 0, 2])
    metrics, ours = gradients(trained, data, monkeypatch)
    theirs = AutoModelForCausalLM.from_pretrained(model_folder("tiny"), dtype=torch.float32)
    tokens, attention, marked = padded(data)
    loss = theirs(input_ids=tokens, attention_mask=attention, labels=tokens.masked_fill(~marked, -100)).loss
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same(ours, theirs)


@pytest.mark.parametrize("micro_tokens", [64, 8192])
def test_pairs_have_the_loss_and_gradients_of_bradley_and_terry(
    micro_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, examples = lesson("reward", trainer={"micro_tokens": micro_tokens}, centring=0.1)
    data = examples.take([5, 1, 2]).adding({"margin_R": np.repeat([0.5, 0.0, 1.0], 2)})
    metrics, ours = gradients(trained, data, monkeypatch)
    theirs = same_classifier(trained)
    tokens, attention, _ = padded(data)
    chosen, rejected = theirs(input_ids=tokens, attention_mask=attention).logits.squeeze(-1).view(-1, 2).T
    loss = -functional.logsigmoid(chosen - rejected - torch.tensor([0.5, 0.0, 1.0])).mean()
    loss = loss + 0.1 * ((chosen + rejected) ** 2).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["bce", "mse"])
def test_every_step_is_scored_at_its_own_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, examples = lesson("process_reward", loss=kind)
    data = examples.take([0, 1, 2, 3])
    metrics, ours = gradients(trained, data, monkeypatch)
    theirs = same_classifier(trained)
    tokens, attention, marked = padded(data)
    hidden = theirs.model(input_ids=tokens, attention_mask=attention).last_hidden_state
    scores = theirs.score(hidden).squeeze(-1)[marked]
    labels = torch.from_numpy(data["label_N"][data["mask_N"]])
    good = scores.sigmoid() if kind == "bce" else scores
    loss = functional.binary_cross_entropy(good, labels) if kind == "bce" else functional.mse_loss(good, labels)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = correlation(good.detach().double().numpy(), labels.double().numpy())
    assert metrics["correlation"] == pytest.approx(expected, abs=1e-3)
    assert_same(ours, theirs)


def test_a_held_out_look_gives_the_numbers_of_a_step() -> None:
    trained, examples = lesson("sft")
    seen = evaluate(fit_recipe("sft"), trained.learner, examples, Alone(), lambda: None)
    metrics = trained.worker.step([examples.take(range(len(examples)))])
    assert seen["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert seen["perplexity"] == pytest.approx(np.exp(metrics["loss"]), rel=1e-4)


# ---------------------------------------------------------------- the formulas


def test_slopes_are_the_derivatives_of_the_losses() -> None:
    rng = np.random.default_rng(0)
    chosen, rejected, margin = 3 * rng.normal(size=(3, 50))
    a, b = (torch.tensor(values, requires_grad=True) for values in (chosen, rejected))
    loss = -functional.logsigmoid(a - b - torch.tensor(margin)) + 0.2 * (a + b) ** 2
    loss.sum().backward()
    np.testing.assert_allclose(pair_losses(chosen, rejected, margin, 0.2), loss.detach().numpy(), rtol=1e-12)
    assert a.grad is not None
    assert b.grad is not None
    for ours, theirs in zip(pair_slopes(chosen, rejected, margin, 0.2), (a.grad, b.grad), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12, atol=1e-14)


def test_pairs_far_apart_stay_finite() -> None:
    far = np.array([1e4, -1e4])
    assert np.isfinite(pair_losses(far, -far, np.zeros(2), 0.0)).all()
    assert np.isfinite(pair_slopes(far, -far, np.zeros(2), 0.0)).all()


def test_area_under_curve_counts_pairs() -> None:
    rng = np.random.default_rng(1)
    score, good = rng.integers(0, 5, 60).astype(float), rng.random(60) < 0.4
    above = [(a > b) + 0.5 * (a == b) for a in score[good] for b in score[~good]]
    assert area_under_curve(score, good) == pytest.approx(np.mean(above))
    assert area_under_curve(score, np.ones(60, bool)) == 0.5


def test_numbers_without_variance_have_no_correlation() -> None:
    assert correlation(np.ones(4), np.arange(4.0)) == 0.0
    assert correlation(np.arange(4.0), 2 * np.arange(4.0)) == pytest.approx(1.0)


def test_step_losses_take_soft_labels() -> None:
    score, label = torch.tensor([0.3, -2.0]), torch.tensor([0.7, 0.1])
    expected = -(label * score.sigmoid().log() + (1 - label) * (1 - score.sigmoid()).log())
    torch.testing.assert_close(step_losses(score, label, "bce"), expected)


def test_ranking_is_over_states_that_have_steps_with_different_labels() -> None:
    state = np.array([1.0, 1, 1, 2, 2, 3, 3])
    label = np.array([1.0, 0, 0, 1, 0, 1, 1])
    score = np.array([0.9, 0.1, 0.95, 0.4, 0.4, 0.0, 1.0])
    found = ranking_of(score, label, state)
    assert (found["ranking"], found["ranked_states"]) == (0.5, 2), "one of two pairs, and a tie"
    assert found["ranking_error"] > 0
    nothing = ranking_of(label, label, np.arange(7.0))
    assert nothing == {"ranking": 0.5, "ranking_error": 0.0, "ranked_states": 0.0}
    good = np.tile([1.0, 0.0], 50)
    found = ranking_of(good, good, np.repeat(np.arange(50.0), 2))
    assert (found["ranking"], found["ranked_states"]) == (1.0, 50)
    assert 0 < found["ranking_error"] < 0.1


def test_calibration_is_the_distance_of_scores_from_labels() -> None:
    assert calibration_error(np.full(10, 0.7), np.array([1.0] * 7 + [0.0] * 3)) == pytest.approx(0.0)
    assert calibration_error(np.full(10, 0.9), np.zeros(10)) == pytest.approx(0.9)


def test_steps_of_one_state_are_known_by_their_question_and_the_steps_before() -> None:
    rows = [
        {"prompt": "2 + 3?", "steps": [{"text": "five", "label": 1.0}, {"text": "done", "label": 1.0}]},
        {"prompt": "2 + 3?", "steps": [{"text": "six", "label": 0.0}, {"text": "done", "label": 0.0}]},
        {"prompt": "2 + 4?", "steps": [{"text": "six", "label": 1.0}]},
    ]
    examples = read_examples(Listed(rows), "", fit_recipe("process_reward"), writer(), 512)
    first, second, third = (group.columns["state_N"] for group in examples.groups)
    assert first[0] == second[0] != third[0]
    assert first[1] != second[1]
