"""A trained reward model in use, and how good the scores of a process reward model are on held-out rows.

    model = RewardModel.load("runs/reward_model-…/model")
    model.score([{"messages": [{"role": "user", "content": "How many cups?"}], "answer": "17"}])
    model.score_steps([{"prompt": "2 + 2 * 3", "steps": [{"text": "2 * 3 = 6"}, {"text": "2 + 6 = 8"}]}])

The code that writes rows as text is that of training. The folder is a plain Hugging Face one
(AutoModelForSequenceClassification with one label), so other reward models can be loaded too. A score depends on its
row only, up to float rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.config import TrainerConfig
from rillflow.trainer.forward import ScalarForward
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import reward_model
from rillflow.trainer.supervised.examples import (
    Answered,
    Example,
    Examples,
    Stepwise,
    read_row,
    write_answer,
    write_steps,
)
from rillflow.trainer.supervised.texts import Writer, Written
from rillflow.weights.model_folder import CHANCE, Quality, RewardFacts, facts_of
from rillflow.weights.models import Dtype, pick_device

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats

_BINS = 10
_NORMAL_95 = 1.96


def correlation(a: Floats, b: Floats) -> float:
    """Return Pearson's correlation; 0 if one of the two does not vary."""
    if len(a) < 2 or not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def area_under_curve(score: Floats, good: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float:
    """Return how often a good one has a higher score than a bad one, ties counting half; 0.5 if one kind is missing."""
    positive, negative = int(good.sum()), int((~good).sum())
    if not positive or not negative:
        return 0.5
    order = np.argsort(score, kind="stable")
    _, first, counts = np.unique(score[order], return_index=True, return_counts=True)
    rank = np.empty(len(score))
    rank[order] = np.repeat(first + (counts + 1) / 2, counts)
    return float((rank[good].sum() - positive * (positive + 1) / 2) / (positive * negative))


def ranking_of(score: Floats, label: Floats, state: Floats) -> dict[str, float]:
    """Return how often the better of two steps at the same state has the higher score (`ranking`, ties count half),
    half of its 95 % interval, and the number of states that have steps with different labels.

    The mean and the interval are over states, since pairs of one state are not independent.
    """
    found: list[float] = []
    for number in np.unique(state):
        here = state == number
        better = label[here][:, None] > label[here][None]
        if better.any():
            above = np.sign(score[here][:, None] - score[here][None])[better]
            found.append(float((above.mean() + 1) / 2))
    # Few states may agree by luck, which would leave no interval: one more state of each kind is added to the spread.
    error = _NORMAL_95 * np.std([*found, 0.0, 1.0]) / np.sqrt(len(found)) if found else 0.0
    ranking = np.mean(found) if found else CHANCE
    return {"ranking": float(ranking), "ranking_error": float(error), "ranked_states": float(len(found))}


def calibration_error(good: Floats, label: Floats) -> float:
    """Return the distance between mean score and mean label, over bins of scores weighted by their size."""
    of = np.clip((good * _BINS).astype(np.int64), 0, _BINS - 1)
    apart = np.abs(np.bincount(of, good, minlength=_BINS) - np.bincount(of, label, minlength=_BINS))
    return float(apart.sum() / max(len(good), 1))


def quality_of(heldout: Mapping[str, float]) -> Quality | None:
    """Return the part of an evaluation that a user of the model must know; None if it does not rank steps."""
    if "ranking" not in heldout:
        return None
    return Quality(
        ranking=heldout["ranking"],
        error=heldout["ranking_error"],
        states=int(heldout["ranked_states"]),
        calibration=heldout["calibration"],
    )


class RewardModel:
    """A reward model with its tokenizer. `load` takes the most tokens of one forward pass, `micro_tokens`."""

    def __init__(self, learner: Learner, writer: Writer, facts: RewardFacts) -> None:
        self._learner = learner
        self._writer = writer
        self.facts = facts

    @classmethod
    def load(cls, folder: str, *, device: str = "auto", dtype: Dtype = "fp32", micro_tokens: int = 8192) -> RewardModel:
        config = TrainerConfig(device=device, dtype=dtype, micro_tokens=micro_tokens)
        model = reward_model(folder, pick_device(device), config)
        learner = Learner("reward", model, ScalarForward(model, config), None, config, Alone())
        return cls(learner, Writer.load(folder), facts_of(folder))

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return a score for each row: an `answer` (text or messages) to a `prompt` (text or messages) or
        `messages`."""
        written = [
            write_answer(read_row(row, Answered, f"row {place}"), self._writer, f"row {place}")
            for place, row in enumerate(rows)
        ]
        return [scores[0] for scores in self._scores(written)]

    def score_steps(self, rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """Return the quality of each of a row's `steps`, on the scale of the labels in training."""
        written = [
            write_steps(read_row(row, Stepwise, f"row {place}"), self._writer, self.facts.separator, f"row {place}")
            for place, row in enumerate(rows)
        ]
        scores = self._scores(written)
        if self.facts.loss == "mse":
            return scores
        return [[float(1 / (1 + np.exp(-score))) for score in row] for row in scores]

    def _scores(self, written: Sequence[Written]) -> list[list[float]]:
        if not written:
            return []
        data = Examples([Example([row]) for row in written], 0).take(range(len(written)))
        score_N = self._learner.infer(data)
        ends = np.cumsum([len(row.marked) for row in written])
        return [part.tolist() for part in np.split(score_N[data["mask_N"]], ends[:-1])]
