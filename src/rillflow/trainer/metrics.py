"""The numbers of one step. Sums stay on the device until the step ends, so a micro-batch never waits for the host."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import torch

from rillflow.trainer.algorithms.common import Clip, ratio
from rillflow.trainer.batches import Rows
from rillflow.trainer.packing import MicroBatch

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats


class Totals:
    """Sums over the trained tokens of a batch, one micro-batch after the other."""

    def __init__(self, clip: Clip, device: torch.device) -> None:
        self._clip = clip
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        self._highest = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, new_T: torch.Tensor, micro: MicroBatch, entropy_T: torch.Tensor) -> None:
        ratio_T = ratio(new_T, micro.old_T)
        sums = (
            loss,
            ((ratio_T < 1 - self._clip.low) & (micro.advantage_T < 0)).sum(),
            ((ratio_T > 1 + self._clip.high) & (micro.advantage_T > 0)).sum(),
            # k3 estimator of KL(old || new) on tokens that old has sampled: r - 1 - log r.
            (ratio_T - 1 - (new_T - micro.old_T)).sum(),
            ratio_T.sum(),
            ratio_T.square().sum(),
            entropy_T.sum(),
        )
        self._sums += torch.stack([value.double() for value in sums])
        self._highest = torch.maximum(self._highest, ratio_T.max())

    def values(self, trained: int) -> dict[str, float]:
        """Means over the batch's trained tokens; ESS is the fraction of them that the ratios leave effective."""
        loss, low, high, kl, ratios, squares, entropy = self._sums.tolist()
        count = max(trained, 1)
        return {
            "loss": loss,
            "clip_low": low / count,
            "clip_high": high / count,
            "approx_kl": kl / count,
            "ratio_mean": ratios / count,
            "ratio_max": float(self._highest),
            "ess": ratios * ratios / (count * squares) if squares else 0.0,
            "entropy": entropy / count,
            "trained_tokens": float(trained),
        }


def batch_values(rows: Rows, advantage_R: Floats) -> dict[str, float]:
    """What can be said of a batch before it is trained on."""
    return {
        "reward_mean": float(rows.reward_R.mean()),
        "reward_std": float(rows.reward_R.std()),
        "advantage_std": float(advantage_R.std()),
        "response_length": float(rows.trained_R.mean()),
        "truncated": float(rows.truncated_R.mean()),
        "staleness_mean": float(rows.staleness_R.mean()),
        "staleness_max": float(rows.staleness_R.max()),
        "samples": float(len(rows.length_R)),
        "tokens": float(rows.length_R.sum()),
    }


def finite(values: dict[str, float]) -> dict[str, float]:
    """Without what is not a number: nothing downstream can plot or store it."""
    return {name: value for name, value in values.items() if isfinite(value)}
