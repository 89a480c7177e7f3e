"""The step graphs of supervised training: losses, nodes and the evaluation of held-out rows.

    sft             fetch_demonstrations → train_sft → publish
    reward          fetch_pairs → reward_scores → pair_slopes → train_reward → publish
    process_reward  fetch_steps → train_steps → publish

Answers: the negative log-likelihood, the mean over all trained tokens, as in transformers. Pairs (Bradley and Terry):
the mean over pairs of -log sigmoid(chosen - rejected - margin) + centring * (chosen + rejected)^2, as in TRL's
RewardTrainer. Steps: binary cross-entropy of the sigmoid of the score against the label, or their squared difference,
the mean over all steps.

The loss of a pair needs both scores, whose rows may be in different micro-batches. So pairs are scored first; training
then multiplies each score by the gradient of its pair's loss. That gives the same gradients for one more forward pass,
however rows are packed and distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from rillflow.config import NodeConfig
from rillflow.config.supervised import FitRecipe
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.graph.builtin import PUBLISH
from rillflow.trainer.graph.nodes import REGISTRY, Function
from rillflow.trainer.graph.train import learner_of
from rillflow.trainer.graph.worker import Model, Parts, Step
from rillflow.trainer.learner import Measured, Objective
from rillflow.trainer.packing import MicroBatch
from rillflow.trainer.parallel import Peers
from rillflow.trainer.supervised.examples import Examples
from rillflow.trainer.supervised.reward_model import area_under_curve, calibration_error, correlation, ranking_of
from rillflow.weights.model_folder import StepLossName

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Floats, Ints

    Scores = npt.NDArray[np.float32]


def pair_losses(chosen_G: Floats, rejected_G: Floats, margin_G: Floats, centring: float) -> Floats:
    """Return the loss of each pair."""
    # -log sigmoid(x), without overflow.
    loss_G: Floats = np.logaddexp(0.0, -(chosen_G - rejected_G - margin_G))
    return loss_G + centring * (chosen_G + rejected_G) ** 2


def pair_slopes(
    chosen_G: Floats, rejected_G: Floats, margin_G: Floats, centring: float
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return the derivatives of each pair's loss by its two scores."""
    pull_G = -np.exp(-np.logaddexp(0.0, chosen_G - rejected_G - margin_G))
    centre_G = 2 * centring * (chosen_G + rejected_G)
    return pull_G + centre_G, -pull_G + centre_G


def step_losses(score_T: torch.Tensor, label_T: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the loss of each step."""
    if kind == "mse":
        return functional.mse_loss(score_T, label_T, reduction="none")
    return functional.binary_cross_entropy_with_logits(score_T, label_T, reduction="none")


# ---------------------------------------------------------------- nodes of the step graphs


STEP_LOSS: StepLossName = "bce"


def graph_of(recipe: FitRecipe) -> list[NodeConfig]:
    """Return the nodes of the task with the recipe's options and own nodes, or the recipe's whole graph."""
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
    return recipe.trainer.graph or [*nodes, *recipe.trainer.nodes, NodeConfig(function=PUBLISH)]


# ---------------------------------------------------------------- answers


class Likelihood(Objective):
    """The mean negative log-likelihood of the trained tokens."""

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
    """The mean over pairs of each score times the gradient of its pair's loss; its own gradient is that of the loss."""

    def columns(self, data: Databuffer) -> list[str]:
        return ["slope_N"]

    def count(self, data: Databuffer) -> float:
        return float(data["chosen_R"].sum())

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return (score_T * micro.columns["slope_T"]).sum()


def places_of_pairs(data: Databuffer) -> tuple[Ints, Ints]:
    """Return the chosen rows and the rejected rows, in the order of their pairs."""
    chosen_R, member_R = data["chosen_R"], data["member_R"]
    good, bad = np.flatnonzero(chosen_R), np.flatnonzero(~chosen_R)
    good, bad = good[np.argsort(member_R[good])], bad[np.argsort(member_R[bad])]
    assert np.array_equal(member_R[good], member_R[bad]), "a pair was split"
    return good, bad


def pair_scores(data: Databuffer, score_N: Any) -> tuple[Floats, Floats, Floats]:
    """Return the scores of chosen and of rejected rows, and the wanted margin between them."""
    good, bad = places_of_pairs(data)
    score_R = score_N[data["mask_N"]].astype(np.float64)
    return score_R[good], score_R[bad], data["margin_R"][good]


def reward_scores(step: Step, data: Databuffer) -> Mapping[str, Any]:
    return {"score_N": step.models["reward"].infer(data, step.check)}


def slopes_of_pairs(step: Step, data: Databuffer, centring: float = 0.0) -> Mapping[str, Any]:
    """Return the gradient of each score's loss, and report metrics of the pairs. Collective."""
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
    return {name: value for name, value in metrics.items() if name != "loss"}  # this is not the pairs' loss


# ---------------------------------------------------------------- steps


class StepLoss(Objective):
    """The mean loss of all steps' scores against their labels."""

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


# ---------------------------------------------------------------- held-out rows


def evaluate(
    recipe: FitRecipe, model: Model, heldout: Examples, peers: Peers, check: Callable[[], None]
) -> dict[str, float]:
    """Return metrics of held-out rows, equal on every rank. Each rank scores its share of the rows. Collective."""
    data = heldout.take(range(peers.rank, len(heldout), peers.size))
    score_N = model.infer(data, check)
    return {"sft": _answers, "reward": _pairs, "process_reward": _steps}[recipe.task](recipe, data, score_N, peers)


def _answers(recipe: FitRecipe, data: Databuffer, score_N: Scores, peers: Peers) -> dict[str, float]:
    trained_N = data["mask_N"]
    total, tokens = peers.total([-score_N[trained_N].sum(dtype=np.float64), trained_N.sum()])
    loss = total / max(tokens, 1)
    return {"loss": loss, "perplexity": float(np.exp(min(loss, 700.0)))}


def _pairs(recipe: FitRecipe, data: Databuffer, score_N: Scores, peers: Peers) -> dict[str, float]:
    chosen_G, rejected_G, margin_G = _everyones(pair_scores(data, score_N), peers)
    return {
        "loss": float(pair_losses(chosen_G, rejected_G, margin_G, recipe.centring or 0.0).mean()),
        "accuracy": float((chosen_G > rejected_G).mean()),
        "margin": float((chosen_G - rejected_G).mean()),
    }


def _steps(recipe: FitRecipe, data: Databuffer, score_N: Scores, peers: Peers) -> dict[str, float]:
    marked_N, kind = data["mask_N"], recipe.loss or STEP_LOSS
    columns = (score_N[marked_N], data["label_N"][marked_N], data["state_N"][marked_N])
    score_T, label_T, state_T = _everyones(columns, peers)
    loss_T = step_losses(torch.from_numpy(score_T), torch.from_numpy(label_T), kind)
    good_T = 1 / (1 + np.exp(-score_T)) if kind == "bce" else score_T
    return {
        "loss": float(loss_T.mean()),
        "accuracy": float(((good_T > 0.5) == (label_T > 0.5)).mean()),
        "auc": area_under_curve(score_T, label_T > 0.5),
        "correlation": correlation(good_T, label_T),
        "calibration": calibration_error(good_T, label_T),
        **ranking_of(score_T, label_T, state_T),
    }


def _everyones(columns: Sequence[npt.NDArray[np.floating]], peers: Peers) -> list[Floats]:
    """Return each column with the values of all ranks."""
    own = np.stack([np.asarray(column, np.float64) for column in columns])
    parts = [np.frombuffer(part).reshape(len(columns), -1) for part in peers.everyone(own.tobytes())]
    return list(np.concatenate(parts, axis=1))
