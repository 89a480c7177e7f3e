"""The numbers of one step, over all parts of its batch.

Sums stay on the device until the step ends, so a micro-batch never waits for the host.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.trainer.algorithms.common import Loss, WholeRows, ratio
from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Floats


class Totals:
    """Sums over the trained tokens of a batch, one micro-batch after the other."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        self._highest = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, of: Loss, tokens: WholeRows, entropy_T: torch.Tensor) -> None:
        """`loss` is the micro-batch's value of the loss `of`; `tokens` carry no gradient."""
        ratio_T = ratio(tokens.new_T, tokens.old_T)
        low_T, high_T = of.held(tokens)
        sums = (
            loss,
            low_T.sum(),
            high_T.sum(),
            # k3 estimator of KL(old || new) on tokens that old has sampled: r - 1 - log r.
            (ratio_T - 1 - (tokens.new_T - tokens.old_T)).sum(),
            ratio_T.sum(),
            ratio_T.square().sum(),
            entropy_T.sum(),
        )
        self._sums += torch.stack([value.double() for value in sums])
        self._highest = torch.maximum(self._highest, ratio_T.max())

    def values(self, trained: int, scale: float) -> dict[str, float]:
        """Means over the batch's trained tokens; ESS is the fraction of them that the ratios leave effective.

        `scale` is one over the count that the algorithm divides the loss by.
        """
        loss, low, high, kl, ratios, squares, entropy = self._sums.tolist()
        count = max(trained, 1)
        return {
            "loss": loss * scale,
            "clip_low": low / count,
            "clip_high": high / count,
            "approx_kl": kl / count,
            "ratio_mean": ratios / count,
            "ratio_max": float(self._highest),
            "ess": ratios * ratios / (count * squares) if squares else 0.0,
            "entropy": entropy / count,
            "trained_tokens": float(trained),
        }


class RowValues:
    """What the rows of a batch say by themselves, whether they are trained or filtered out."""

    def __init__(self) -> None:
        self._parts: list[dict[str, npt.NDArray[np.generic]]] = []

    def add(self, rows: Rows, advantage_R: Floats) -> None:
        self._parts.append(
            {
                "reward": rows.reward_R,
                "advantage": advantage_R,
                "trained": rows.trained_R,
                "length": rows.length_R,
                "truncated": rows.truncated_R,
                "staleness": rows.staleness_R,
                "replayed": rows.replayed_R,
            }
        )

    def values(self) -> dict[str, float]:
        of = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        return {
            "reward_mean": float(of["reward"].mean()),
            "reward_std": float(of["reward"].std()),
            "advantage_std": float(of["advantage"].std()),
            "response_length": float(of["trained"].mean()),
            "truncated": float(of["truncated"].mean()),
            "staleness_mean": float(of["staleness"].mean()),
            "staleness_max": float(of["staleness"].max()),
            "replayed_fraction": float(of["replayed"].mean()),
            "samples": float(len(of["length"])),
            "tokens": float(of["length"].sum()),
            "parts": float(len(self._parts)),
        }


def finite(values: dict[str, float]) -> dict[str, float]:
    """Without what is not a number: nothing downstream can plot or store it."""
    return {name: value for name, value in values.items() if isfinite(value)}
