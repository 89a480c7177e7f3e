"""How far the log-probs of engine and trainer are apart, of the same tokens under the same weights.

Fresh tokens were sampled by the version that the trainer is at before its first update: what differs there comes from
how the two compute (kernels, precision, a cache), and nothing else. All other tokens are counted apart: there the
weights differ, too. Invariant: no number depends on how tokens are split over micro-batches and ranks (up to rounding).

Sums stay on the device until the step ends. The 99th percentile comes from a histogram whose cells grow by 4 %: it is
too high by that much at most. The first cell is that of no difference at all.
"""

from __future__ import annotations

import itertools
import logging

import torch

from rillflow.trainer.algorithms.common import ratio
from rillflow.trainer.parallel.peers import Peers

log = logging.getLogger(__name__)

_KINDS = ("stale_", "")  # by the flag `fresh`
_LEAST, _DECADES, _CELLS_A_DECADE = 1e-9, 12, 64
_CELLS = 1 + _DECADES * _CELLS_A_DECADE
_QUANTILE = 0.99
_SUMS = 4  # of each kind of token: how many, their distances, their log-ratios, their ratios
# Between engine and trainer in the same precision people see 0.001 to 0.02; from here on training suffers.
ALARMING = 0.05


class Consistency:
    """The tokens of one step."""

    def __init__(self) -> None:
        self._sums_2S = torch.zeros(2, _SUMS + _CELLS, dtype=torch.float64)
        self._peak_2 = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def add(self, trainer_T: torch.Tensor, engine_T: torch.Tensor, fresh_T: torch.Tensor) -> None:
        """Log-probs of tokens by both, and whether they are fresh."""
        self._sums_2S, self._peak_2 = self._sums_2S.to(trainer_T.device), self._peak_2.to(trainer_T.device)
        shift_T = (trainer_T - engine_T).double()
        apart_T = shift_T.abs()
        kind_T = (fresh_T > 0).long()
        if not len(kind_T):
            return
        of_kind_2T = torch.stack([kind_T == 0, kind_T == 1])
        ones_T = torch.ones_like(apart_T)
        of_T4 = torch.stack([ones_T, apart_T, shift_T, ratio(trainer_T, engine_T).double()], 1)
        self._sums_2S[:, :_SUMS].index_add_(0, kind_T, of_T4)
        self._sums_2S.view(-1).index_add_(0, kind_T * self._sums_2S.shape[1] + _SUMS + _cell(apart_T), ones_T)
        self._peak_2 = torch.maximum(self._peak_2, torch.where(of_kind_2T, apart_T, 0.0).amax(1))

    def values(self, peers: Peers) -> dict[str, float]:
        """Over all ranks: `consistency/…` of the fresh tokens, `consistency/stale_…` of the others. Collective."""
        sums = peers.total(self._sums_2S.flatten().tolist())
        peaks = peers.highest(self._peak_2.tolist())
        size = len(sums) // 2
        values: dict[str, float] = {}
        for kind, peak, own in zip(_KINDS, peaks, (sums[:size], sums[size:]), strict=True):
            values |= {f"consistency/{kind}{name}": value for name, value in _of_kind(own, peak).items()}
        return values


def _cell(apart_T: torch.Tensor) -> torch.Tensor:
    grown_T = 1 + ((apart_T / _LEAST).clamp(min=1).log10() * _CELLS_A_DECADE).floor()
    # What is not a number is as far apart as can be.
    within_T = torch.nan_to_num(grown_T, nan=float(_CELLS)).clamp(max=_CELLS - 1).long()
    return torch.where(apart_T == 0, torch.zeros_like(within_T), within_T)


def _of_kind(sums: list[float], peak: float) -> dict[str, float]:
    tokens, apart, shift, ratios, *cells = sums
    if not tokens:
        return {"tokens": 0.0}
    return {
        "tokens": tokens,
        "mean": apart / tokens,
        "shift": shift / tokens,
        "max": peak,
        "p99": min(_percentile(cells, _QUANTILE * tokens), peak),
        "ratio": ratios / tokens,
    }


def _percentile(cells: list[float], below: float) -> float:
    """The upper edge of the cell in which so many tokens are reached."""
    reached = itertools.accumulate(cells)
    cell = next((number for number, tokens in enumerate(reached) if tokens >= below), _CELLS - 1)
    return _LEAST * 10 ** (cell / _CELLS_A_DECADE) if cell else 0.0


class Watch:
    """Warns when engine and trainer have come too far apart, and not again before they were near each other."""

    def __init__(self) -> None:
        self._warned = False

    def see(self, metrics: dict[str, float], *, truncated: bool) -> None:
        apart = metrics.get("consistency/mean")
        if apart is None:
            return
        if apart <= ALARMING:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning(
                "engine and trainer disagree on tokens of the same version: log-probs are %.3f apart on average (%.3f "
                "at the 99th percentile, mean importance ratio %.3f); up to %.2f is usual. %s",
                apart, metrics["consistency/p99"], metrics["consistency/ratio"], ALARMING,
                _CORRECTED if truncated else _ADVICE,
            )  # fmt: skip


_ADVICE = (
    "Give both the same precision (engine.dtype and trainer.dtype; bf16 against fp32 is far apart for small models), "
    "check the engine's own options (quantisation, a cache in 8 bits), or weight what is learnt by the difference: "
    "trainer.truncate: 2"
)
_CORRECTED = "trainer.truncate corrects for it; equal precisions (engine.dtype, trainer.dtype) would be better still"
