"""The critic learns the returns: half the squared error, of the value or of its clipped move, the mean over tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rillflow.config import CriticConfig
from rillflow.trainer.algorithms.losses.value import value_loss
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.functions.learners import learner_of
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Parts, Step
from rillflow.trainer.layout import MicroBatch
from rillflow.trainer.objective import Measured, Objective

_OWN = {"loss": "value_loss", "grad_norm": "critic_grad_norm", "lr": "critic_lr", "skipped": "critic_skipped"}


class ValueObjective(Objective):
    """`bound`: how far a value may move from what it was when the advantages were made."""

    sums = ("value", "return", "return_square", "error", "error_square", "clipped")

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def columns(self, data: Databuffer) -> list[str]:
        return ["value_N", "return_N"]

    def count(self, data: Databuffer) -> float:
        return float(data["mask_N"].sum())

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return value_loss(score_T, micro.columns["value_T"], micro.columns["return_T"], self._bound).sum()

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        value_T, return_T = micro.columns["value_T"].double(), micro.columns["return_T"].double()
        error_T = return_T - value_T
        moved_T = (score_T.double() - value_T).clamp(-self._bound, self._bound) + value_T
        clipped_T = (moved_T - return_T).square() > (score_T.double() - return_T).square()
        of = (value_T, return_T, return_T.square(), error_T, error_T.square(), clipped_T)
        return [each_T.sum() for each_T in of], []

    def values(self, sums: dict[str, float], peaks: dict[str, float], tokens: int) -> dict[str, float]:
        """How much of the returns' variance the values explain that the advantages were made with: 1 is all, 0 none."""
        mean = {name: value / max(tokens, 1) for name, value in sums.items()}
        of_returns = mean["return_square"] - mean["return"] ** 2
        of_errors = mean["error_square"] - mean["error"] ** 2
        explained = 1.0 - of_errors / of_returns if of_returns > 0 else 0.0
        return {
            "value_mean": mean["value"],
            "return_mean": mean["return"],
            "explained_variance": explained,
            "value_clip": mean["clipped"],
        }


def train_critic(step: Step, parts: Parts) -> Mapping[str, float]:
    critic = step.config.critic or CriticConfig()
    objective = ValueObjective(critic.value_clip)
    metrics = learner_of(step, "critic").train(parts, objective, step.check, order=step.order)
    shared = ("trained_tokens", "updates", "train_seconds", "mfu")
    return {_OWN.get(name, name): value for name, value in metrics.items() if name not in shared}


REGISTRY.add(
    Function(
        "train_critic", "critic", "train", train_critic, ("value_N", "return_N", "mask_N", "member_R"), default=True
    )
)
