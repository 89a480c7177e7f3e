"""How good the scores of a process reward model are on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rillflow.weights.model_folder import CHANCE, Quality

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
