"""A trained reward model in use: scores of answers, or of the steps towards one.

    model = RewardModel.load("runs/reward_model-…/model")
    model.score([{"messages": [{"role": "user", "content": "How many cups?"}], "answer": "17"}])
    model.score_steps([{"prompt": "2 + 2 * 3", "steps": [{"text": "2 * 3 = 6"}, {"text": "2 + 6 = 8"}]}])

The code that writes rows as text is that of training. The folder is a plain Hugging Face one
(AutoModelForSequenceClassification with one label), so other reward models can be loaded too. A score depends on its
row only, up to float rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rillflow.config import TrainerConfig
from rillflow.trainer.forward import ScalarForward
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel.peers import Alone
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
from rillflow.weights.model_folder import RewardFacts, facts_of
from rillflow.weights.models import Dtype, pick_device


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
