"""How good a model is on held-out rows, the same numbers on every rank. Collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.config.supervised import FitRecipe
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.step import Model
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.supervised.examples import Examples
from rillflow.trainer.supervised.functions import STEP_LOSS, pair_scores
from rillflow.trainer.supervised.losses import area_under_curve, correlation, pair_losses, step_losses

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Floats

    Scores = npt.NDArray[np.float32]


def evaluate(
    recipe: FitRecipe, model: Model, heldout: Examples, peers: Peers, check: Callable[[], None]
) -> dict[str, float]:
    """Each rank scores its share of the rows; only scores travel."""
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
    score_T, label_T = _everyones((score_N[marked_N], data["label_N"][marked_N]), peers)
    loss_T = step_losses(torch.from_numpy(score_T), torch.from_numpy(label_T), kind)
    good_T = 1 / (1 + np.exp(-score_T)) if kind == "bce" else score_T
    return {
        "loss": float(loss_T.mean()),
        "accuracy": float(((good_T > 0.5) == (label_T > 0.5)).mean()),
        "auc": area_under_curve(score_T, label_T > 0.5),
        "correlation": correlation(good_T, label_T),
    }


def _everyones(columns: Sequence[npt.NDArray[np.floating]], peers: Peers) -> list[Floats]:
    """Each column with the values of all ranks."""
    own = np.stack([np.asarray(column, np.float64) for column in columns])
    parts = [np.frombuffer(part).reshape(len(columns), -1) for part in peers.everyone(own.tobytes())]
    return list(np.concatenate(parts, axis=1))
