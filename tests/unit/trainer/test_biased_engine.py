"""An engine that computes the same weights less precisely samples another policy than the trainer's: truncated
importance weights learn what should be learnt all the same."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from trainer_helpers import VOCAB, learner, small_model

from rillflow.trainer.batches import Rows, make_rows
from rillflow.types import BatchSample, Row

PROMPT = [3, 7, 11, 2]
DRAWN = 4096
WORTH_V = (torch.arange(VOCAB) % 3 == 0).double()  # the reward of each answer of one token


def coarse(model: Any) -> Any:
    """The same weights, in steps of a tenth: a badly quantised engine."""
    engine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.copy_((parameter * 10).round() / 10)
    return engine


def distribution(model: Any) -> torch.Tensor:
    return model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)


def played(model: Any, engine: Any) -> Rows:
    """Answers as the engine draws and reports them; their advantages are those under the trainer's policy."""
    with torch.no_grad():
        trainer_V, engine_V = distribution(model), distribution(engine)
    expected = float((trainer_V * WORTH_V).sum())
    answers = torch.multinomial(engine_V, DRAWN, replacement=True, generator=torch.Generator().manual_seed(0))
    samples, payload = [], []
    for number, answer in enumerate(answers.tolist()):
        logprob = np.array([0.0] * len(PROMPT) + [float(engine_V[answer].log())], "<f4")
        mask = np.array([0] * len(PROMPT) + [1], "u1")
        payload.append(
            {
                "tokens": np.array([*PROMPT, answer], "<i4"),
                "mask": mask,
                "logprobs": logprob,
                "raw_logprobs": logprob,
                "temperatures": np.ones(len(mask), "<f4"),
                "versions": np.where(mask, 5, -1).astype("<i4"),
            }
        )
        samples.append(
            BatchSample(
                id=str(number),
                row=Row(unit="u", segment=0, offset=number, length=1),
                tokens=len(mask),
                trained=1,
                reward=float(WORTH_V[answer]),
                group="g",
                group_mean=expected,
                group_std=1.0,
                group_size=DRAWN,
                staleness=0,
                truncated=False,
                policy="agent",
            )
        )
    return make_rows(samples, payload, "agent", 5)


def true_gradient(model: Any) -> torch.Tensor:
    """Return the gradient of the expected reward under the trainer's own policy."""
    model.zero_grad()
    (-(distribution(model) * WORTH_V).sum()).backward()
    return gradient(model)


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def learnt(model: Any, rows: Rows, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of a step, and its metrics."""
    trained = copy.deepcopy(model)
    worker = learner(trained, micro_tokens=4096, **settings)
    seen: list[torch.Tensor] = []
    optimizer: Any = worker._models["actor"].optimizer
    update = optimizer.update

    def noted(scale: float) -> dict[str, float]:
        seen.append(gradient(trained).clone())
        return update(scale)

    optimizer.update = noted
    metrics = worker.step([rows])
    return seen[0], metrics


def test_truncated_weights_correct_a_biased_engine() -> None:
    model = small_model()
    rows = played(model, coarse(model))
    true = true_gradient(copy.deepcopy(model))
    plain, metrics = learnt(model, rows)
    corrected, other = learnt(model, rows, truncate=5.0)
    assert metrics["consistency/mean"] > 0.05, "the engine is biased"
    assert metrics["consistency/mean"] == pytest.approx(other["consistency/mean"])
    assert metrics["consistency/ratio"] == pytest.approx(1.0, abs=0.05), "but honest in what it reports"
    near = [float(torch.cosine_similarity(true, found, dim=0)) for found in (plain, corrected)]
    assert near[1] > 0.98
    assert 1 - near[1] < 0.5 * (1 - near[0]), near
