"""The nodes of supervised step graphs, one graph for each task.

    sft             fetch_demonstrations → train_sft → publish
    reward          fetch_pairs → reward_scores → pair_slopes → train_reward → publish
    process_reward  fetch_steps → train_steps → publish

The loss of a pair needs both scores, whose rows may be in different micro-batches. So pairs are scored first; the
slopes of their losses are then what each score is multiplied by in training: the same gradients, at the price of one
more forward pass, however rows are packed and spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rillflow.config import NodeConfig
from rillflow.config.supervised import FitRecipe
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.functions.learners import learner_of  # with the package, `publish` is registered
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Parts, Step
from rillflow.trainer.layout import MicroBatch
from rillflow.trainer.objective import Measured, Objective
from rillflow.trainer.supervised.losses import pair_losses, pair_slopes, step_losses

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Ints

StepLossName = Literal["bce", "mse"]
STEP_LOSS: StepLossName = "bce"


def graph_of(recipe: FitRecipe) -> list[NodeConfig]:
    """The nodes of the task, with the recipe's options, or those that the recipe gives, and its own."""
    nodes = {
        "sft": [NodeConfig(function="fetch_demonstrations"), NodeConfig(function="train_sft")],
        "reward": [
            NodeConfig(function="fetch_pairs"),
            NodeConfig(function="reward_scores"),
            NodeConfig(function="pair_slopes", options={"centring": recipe.centring or 0.0}),
            NodeConfig(function="train_reward"),
        ],
        "process_reward": [
            NodeConfig(function="fetch_steps"),
            NodeConfig(function="train_steps", options={"loss": recipe.loss or STEP_LOSS}),
        ],
    }[recipe.task]
    return recipe.trainer.graph or [*nodes, *recipe.trainer.nodes, NodeConfig(function="publish")]


# ---------------------------------------------------------------- answers


class Likelihood(Objective):
    """The negative log-likelihood of the trained tokens, the mean over all of them."""

    sums = ("entropy",)

    def columns(self, data: Databuffer) -> list[str]:
        return []

    def count(self, data: Databuffer) -> float:
        return float(data["mask_N"].sum())

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return -score_T.sum()

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        return [torch.zeros(()) if entropy_T is None else entropy_T.sum()], []

    def values(self, sums: Mapping[str, float], peaks: Mapping[str, float], tokens: float) -> dict[str, float]:
        return {"entropy": sums["entropy"] / max(tokens, 1)}


def fetch_rows(step: Step) -> Iterator[Databuffer]:
    return step.fetch()


def train_sft(step: Step, parts: Parts) -> Mapping[str, float]:
    return learner_of(step, "actor").train(parts, Likelihood(), step.check)


# ---------------------------------------------------------------- pairs


class Sloped(Objective):
    """Each score times the slope of its pair's loss, the mean over all pairs: it has that loss's gradient."""

    def columns(self, data: Databuffer) -> list[str]:
        return ["slope_N"]

    def count(self, data: Databuffer) -> float:
        return float(data["chosen_R"].sum())

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return (score_T * micro.columns["slope_T"]).sum()


def places_of_pairs(data: Databuffer) -> tuple[Ints, Ints]:
    """The rows that were chosen and those that were rejected, in the order of their pairs."""
    chosen_R, member_R = data["chosen_R"], data["member_R"]
    good, bad = np.flatnonzero(chosen_R), np.flatnonzero(~chosen_R)
    good, bad = good[np.argsort(member_R[good])], bad[np.argsort(member_R[bad])]
    assert np.array_equal(member_R[good], member_R[bad]), "a pair was torn apart"
    return good, bad


def pair_scores(data: Databuffer, score_N: Any) -> tuple[Floats, Floats, Floats]:
    """The scores of those chosen and of those rejected, and the margin that is wanted between them."""
    good, bad = places_of_pairs(data)
    score_R = score_N[data["mask_N"]].astype(np.float64)
    return score_R[good], score_R[bad], data["margin_R"][good]


def reward_scores(step: Step, data: Databuffer) -> Mapping[str, Any]:
    return {"score_N": step.models["reward"].infer(data, step.check)}


def slopes_of_pairs(step: Step, data: Databuffer, centring: float = 0.0) -> Mapping[str, Any]:
    """The slope of each score's loss, and what the pairs say of the model. Collective."""
    chosen_G, rejected_G, margin_G = pair_scores(data, data["score_N"])
    slope_R = np.zeros(len(data))
    good, bad = places_of_pairs(data)
    slope_R[good], slope_R[bad] = pair_slopes(chosen_G, rejected_G, margin_G, centring)
    loss_G = pair_losses(chosen_G, rejected_G, margin_G, centring)
    away_G = chosen_G - rejected_G
    loss, right, away, mean, pairs = step.peers.total(
        [loss_G.sum(), (away_G > 0).sum(), away_G.sum(), (chosen_G + rejected_G).sum() / 2, len(away_G)]
    )
    values = {"loss": loss, "accuracy": right, "margin": away, "score_mean": mean}
    step.metrics |= {name: value / max(pairs, 1) for name, value in values.items()}
    slope_N = np.zeros(len(data["tokens_N"]), np.float32)
    slope_N[data["mask_N"]] = slope_R
    return {"slope_N": slope_N}


def train_reward(step: Step, parts: Parts) -> Mapping[str, float]:
    metrics = learner_of(step, "reward").train(parts, Sloped(), step.check)
    return {name: value for name, value in metrics.items() if name != "loss"}  # it is not the pairs' loss


# ---------------------------------------------------------------- steps


class StepLoss(Objective):
    """The loss of every step's score against its label, the mean over all steps."""

    sums = ("right", "score", "label", "score2", "label2", "product")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def columns(self, data: Databuffer) -> list[str]:
        return ["label_N"]

    def count(self, data: Databuffer) -> float:
        return float(data["mask_N"].sum())

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return step_losses(score_T, micro.columns["label_T"], self._kind).sum()

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        label_T = micro.columns["label_T"]
        good_T = score_T.sigmoid() if self._kind == "bce" else score_T
        right_T = (good_T > 0.5) == (label_T > 0.5)
        values = (right_T, good_T, label_T, good_T.square(), label_T.square(), good_T * label_T)
        return [value.sum() for value in values], []

    def values(self, sums: Mapping[str, float], peaks: Mapping[str, float], tokens: float) -> dict[str, float]:
        mean = {name: value / max(tokens, 1) for name, value in sums.items()}
        spread = (mean["score2"] - mean["score"] ** 2) * (mean["label2"] - mean["label"] ** 2)
        together = mean["product"] - mean["score"] * mean["label"]
        return {
            "accuracy": mean["right"],
            "score_mean": mean["score"],
            "label_mean": mean["label"],
            "correlation": together / spread**0.5 if spread > 0 else 0.0,
        }


def train_steps(step: Step, parts: Parts, loss: str = STEP_LOSS) -> Mapping[str, float]:
    return learner_of(step, "reward").train(parts, StepLoss(loss), step.check)


for _function in (
    Function("fetch_demonstrations", "actor", "fetch", fetch_rows),
    Function("fetch_pairs", "reward", "fetch", fetch_rows, gives=("chosen_R", "margin_R")),
    Function("fetch_steps", "reward", "fetch", fetch_rows, gives=("label_N",)),
    Function("reward_scores", "reward", "infer", reward_scores, gives=("score_N",)),
    Function(
        "pair_slopes",
        "reward",
        "compute",
        slopes_of_pairs,
        needs=("score_N", "chosen_R", "margin_R", "member_R"),
        gives=("slope_N",),
        scope="batch",
    ),
    Function("train_sft", "actor", "train", train_sft),
    Function("train_reward", "reward", "train", train_reward, needs=("slope_N", "chosen_R")),
    Function("train_steps", "reward", "train", train_steps, needs=("label_N",)),
):
    REGISTRY.add(_function)
