"""The shipped stages: log-probs of the reference model, and scores of a reward model.

The reference model, for the KL term, is the one that the trainer would run itself (`trainer.kl.reference`, or the
policy's initial weights), by the same code and at the same temperatures, so the numbers are the same up to the rounding
of differently packed rows.

A reward model is a causal model with a head of one number, as `rillflow fit` trains them. It reads a sample's own
tokens without retokenising, so it must share the policy's tokenizer. The score of an answer is taken at the answer's
last token. A sample with several answers (turns) has the score of its last one, or the mean or the least of all
(`over`), as process reward models are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rillflow.config import Recipe
from rillflow.errors import ConfigError
from rillflow.trainer.batches import REFERENCE, SCORE, Databuffer
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel.peers import Alone
from rillflow.trainer.roles import reward_model
from rillflow.weights.model_folder import facts_of
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Column


class ReferenceLogprobs:
    def __init__(self, recipe: Recipe, policy: str) -> None:
        settings = recipe.policies[policy]
        config = settings.trainer.model_copy(update={"sharding": "none"})
        folder = config.kl.reference if config.kl is not None else None
        model = load_policy_model(folder or settings.model, config.dtype, pick_device(config.device))
        self._learner = Learner(
            "reference",
            model.requires_grad_(False),
            PolicyForward(model, config),
            None,
            config,
            Alone(),
            in_order=recipe.runtime.deterministic,
        )

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        return {REFERENCE: self._learner.infer(data)}


# ---------------------------------------------------------------- a reward model


Over = Literal["last", "mean", "min"]


class RewardScores:
    """A reward model as a stage. The trainer adds `weight` times the score to the reward."""

    def __init__(self, recipe: Recipe, policy: str, *, model: str, weight: float = 1.0, over: Over = "last") -> None:
        if over not in _OVER:
            raise ConfigError(f"a reward model has no `over: {over}`", f"one of: {', '.join(_OVER)}")
        settings = recipe.policies[policy]
        _check_vocabulary(model, settings.model)
        config = settings.trainer.model_copy(update={"sharding": "none", "lora": None, "trees": False})
        loaded = reward_model(model, pick_device(config.device), config)
        self._learner = Learner("reward", loaded, ScalarForward(loaded, config), None, config, Alone())
        facts = facts_of(model)
        self._sigmoid = facts.task == "process_reward" and facts.loss != "mse"
        self._weight = weight
        self._over = _OVER[over]

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        end_N = answer_ends(data)
        scored = Databuffer(replace(data.rows, mask_N=end_N))
        score_N = self._learner.infer(scored).astype(np.float64)
        if self._sigmoid:
            score_N = 1.0 / (1.0 + np.exp(-score_N))
        of_rows = np.split(np.where(end_N, score_N, np.nan), data.rows.start_R[1:])
        of_answers = (row[~np.isnan(row)] for row in of_rows)
        return {
            SCORE: self._weight * np.array([self._over(score_A) if len(score_A) else 0.0 for score_A in of_answers])
        }


_OVER: dict[Over, Callable[[npt.NDArray[np.float64]], float]] = {
    "last": lambda score_A: float(score_A[-1]),
    "mean": lambda score_A: float(score_A.mean()),
    "min": lambda score_A: float(score_A.min()),
}


def answer_ends(data: Databuffer) -> npt.NDArray[np.bool_]:
    """Return where an answer ends: trained tokens that are followed by one that is not, or by another sample."""
    mask_N = data.rows.mask_N
    following_N = np.append(mask_N[1:], False)
    following_N[data.rows.start_R[1:] - 1] = False
    ends: npt.NDArray[np.bool_] = mask_N & ~following_N
    return ends


def _check_vocabulary(model: str, policy: str) -> None:
    if load_tokenizer(model).get_vocab() != load_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"the reward model {model} has another tokenizer than the policy {policy}",
            "a stage scores the policy's own tokens; use the model in a reward function instead (docs/rewards.md)",
        )
