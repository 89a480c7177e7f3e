"""The measurements of one step, over all parts of its batch and all ranks.

    Totals, RowValues    sums over tokens and over rows
    Consistency          the distance between the log-probs of engine and trainer
    KeptValues           advantages and log-probs of the episodes that the run keeps for people

Invariants: values stay on the device until the step ends, so a micro-batch never waits for the host; no number depends
on how tokens are split over micro-batches and ranks, up to rounding.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rillflow.errors import GraphError
from rillflow.trainer.algorithms.common import ratio
from rillflow.trainer.batches import Rows, split_key
from rillflow.trainer.packing import MicroBatch
from rillflow.trainer.parallel import Peers
from rillflow.types import KeptTokens

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints
    from rillflow.trainer.learner import Measured


log = logging.getLogger(__name__)


class Totals:
    """The measurements of an objective, summed over micro-batches."""

    def __init__(self, sums: Sequence[str], peaks: Sequence[str], device: torch.device) -> None:
        self._names = (list(sums), list(peaks))
        self._sums = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self._peaks = torch.full((len(peaks),), -torch.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, measured: Measured) -> None:
        sums, peaks = measured
        if sums:
            self._sums += torch.stack([value.double() for value in sums])
        if peaks:
            self._peaks = torch.maximum(self._peaks, torch.stack([value.double() for value in peaks]))

    def values(self, peers: Peers) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums and peaks over all ranks, by name."""
        sums, peaks = peers.total(self._sums.tolist()), peers.highest(self._peaks.tolist())
        return dict(zip(self._names[0], sums, strict=True)), dict(zip(self._names[1], peaks, strict=True))


class RowValues:
    """Statistics of a batch's rows as they were sampled, before shaping and filtering."""

    def __init__(self) -> None:
        self._sums = np.zeros(8)
        self._stalest = 0.0
        self._parts = 0
        self._varied_G: dict[int, bool] = {}

    def add(self, rows: Rows) -> None:
        columns = (
            np.ones(len(rows.length_R)),
            rows.length_R,
            rows.reward_R,
            rows.reward_R**2,
            rows.trained_R,
            rows.truncated_R,
            rows.staleness_R,
            rows.replayed_R,
        )
        self._sums += [column_R.sum() for column_R in columns]
        self._stalest = max(self._stalest, float(rows.staleness_R.max(initial=0)))
        self._parts += 1
        for member, varies in zip(rows.member_R.tolist(), (rows.group_std_R > 0).tolist(), strict=True):
            self._varied_G[member] = self._varied_G.get(member, False) or varies

    def values(self, peers: Peers) -> dict[str, float]:
        samples, tokens, reward, square, trained, truncated, staleness, replayed = peers.total(self._sums.tolist())
        stalest, parts, last = peers.highest([self._stalest, self._parts, max(self._varied_G, default=-1)])
        rows = max(samples, 1.0)
        return {
            "reward_mean": reward / rows,
            "reward_std": sqrt(max(square / rows - (reward / rows) ** 2, 0.0)),
            "response_length": trained / rows,
            "truncated": truncated / rows,
            "staleness_mean": staleness / rows,
            "staleness_max": stalest,
            "replayed_fraction": replayed / rows,
            "zero_variance": self._without_variance(int(last) + 1, peers),
            "samples": samples,
            "tokens": tokens,
            "parts": parts,
        }

    def _without_variance(self, groups: int, peers: Peers) -> float:
        """Return the fraction of groups whose rewards are all equal. A group's rows may be on several ranks."""
        there = [float(member in self._varied_G) for member in range(groups)]
        varied = [float(self._varied_G.get(member, False)) for member in range(groups)]
        both = peers.total([*there, *varied])
        seen = sum(count > 0 for count in both[:groups])
        return 1.0 - sum(count > 0 for count in both[groups:]) / seen if seen else 0.0


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values as floats, without those that are not finite: nothing can plot or store them."""
    numbers = {name: _number(name, value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if isfinite(number)}


def _number(name: str, value: Any) -> float:
    """Convert a value of a node: a number of Python or numpy, or a tensor of one value."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise GraphError(
            f"the metric {name} is of type {type(value).__name__}, not a number", "report one number under each name"
        ) from None


# ---------------------------------------------------------------- log-probs of engine and trainer


_KINDS = ("stale_", "")  # by the flag `fresh`
_LEAST, _DECADES, _CELLS_A_DECADE = 1e-9, 12, 64
_CELLS = 1 + _DECADES * _CELLS_A_DECADE
_QUANTILE = 0.99
_CONSISTENCY_SUMS = 4  # for each kind of token: their number, distances, log-ratios and ratios
# Equal precisions usually give 0.001 to 0.02. Above this mean distance training suffers.
ALARMING = 0.05


class Consistency:
    """The distance between log-probs of engine and trainer, over the tokens of one step.

    Fresh tokens were sampled by the trainer's version before its first update, so their difference comes from the
    computation alone (kernels, precision, a cache). All other tokens are summed separately: their weights differ too.
    The 99th percentile comes from a histogram whose cells grow by 4 %, so it is at most that much too high; the first
    cell holds tokens without a difference.
    """

    def __init__(self) -> None:
        self._sums_2S = torch.zeros(2, _CONSISTENCY_SUMS + _CELLS, dtype=torch.float64)
        self._peak_2 = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def add(self, trainer_T: torch.Tensor, engine_T: torch.Tensor, fresh_T: torch.Tensor) -> None:
        """Add log-probs of the same tokens by trainer and engine, and whether they are fresh."""
        self._sums_2S, self._peak_2 = self._sums_2S.to(trainer_T.device), self._peak_2.to(trainer_T.device)
        shift_T = (trainer_T - engine_T).double()
        apart_T = shift_T.abs()
        kind_T = (fresh_T > 0).long()
        if not len(kind_T):
            return
        of_kind_2T = torch.stack([kind_T == 0, kind_T == 1])
        ones_T = torch.ones_like(apart_T)
        of_T4 = torch.stack([ones_T, apart_T, shift_T, ratio(trainer_T, engine_T).double()], 1)
        self._sums_2S[:, :_CONSISTENCY_SUMS].index_add_(0, kind_T, of_T4)
        self._sums_2S.view(-1).index_add_(
            0, kind_T * self._sums_2S.shape[1] + _CONSISTENCY_SUMS + _cell(apart_T), ones_T
        )
        self._peak_2 = torch.maximum(self._peak_2, torch.where(of_kind_2T, apart_T, 0.0).amax(1))

    def values(self, peers: Peers) -> dict[str, float]:
        """Return metrics over all ranks: `consistency/…` for fresh tokens, `consistency/stale_…` for others.
        Collective."""
        sums = peers.total(self._sums_2S.flatten().tolist())
        peaks = peers.highest(self._peak_2.tolist())
        size = len(sums) // 2
        values: dict[str, float] = {}
        for kind, peak, own in zip(_KINDS, peaks, (sums[:size], sums[size:]), strict=True):
            values |= {f"consistency/{kind}{name}": value for name, value in _of_kind(own, peak).items()}
        return values


def _cell(apart_T: torch.Tensor) -> torch.Tensor:
    grown_T = 1 + ((apart_T / _LEAST).clamp(min=1).log10() * _CELLS_A_DECADE).floor()
    # NaN goes into the last cell.
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
    """Return the upper edge of the cell in which the running count reaches `below` tokens."""
    reached = itertools.accumulate(cells)
    cell = next((number for number, tokens in enumerate(reached) if tokens >= below), _CELLS - 1)
    return _LEAST * 10 ** (cell / _CELLS_A_DECADE) if cell else 0.0


class Watch:
    """Warns when engine and trainer are too far apart, and again only after they have been close."""

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


# ---------------------------------------------------------------- tokens of episodes that the run keeps


MOST_TOKENS = 1 << 18  # that one rank reports for a step


class KeptValues:
    """The reported tokens of one step, for the samples with a key (`batches.sample_key`)."""

    def __init__(self) -> None:
        self._seen: list[tuple[Ints, Ints, torch.Tensor]] = []
        self._tokens = 0

    @torch.no_grad()
    def add(self, micro: MicroBatch, advantage_T: torch.Tensor, logprob_T: torch.Tensor) -> None:
        """Take the values of the micro-batch's tokens that belong to kept samples."""
        at = np.flatnonzero(micro.kept_T)
        if not len(at) or self._tokens + len(at) > MOST_TOKENS:
            return
        self._tokens += len(at)
        index = torch.from_numpy(at).to(advantage_T.device)
        values_2T = torch.stack([advantage_T[index].float(), logprob_T[index].float()])
        self._seen.append((micro.kept_T[at], micro.depth_T[at], values_2T))

    def values(self) -> list[KeptTokens]:
        """Return the reported values of each sample."""
        if not self._seen:
            return []
        key_T = np.concatenate([key for key, _, _ in self._seen])
        depth_T = np.concatenate([depth for _, depth, _ in self._seen])
        advantage_T, logprob_T = np.concatenate([values.cpu().numpy() for _, _, values in self._seen], axis=1)
        return [_kept_tokens(key, key_T == key, depth_T, advantage_T, logprob_T) for key in np.unique(key_T).tolist()]


def _kept_tokens(
    key: int, own_T: np.ndarray, depth_T: Ints, advantage_T: np.ndarray, logprob_T: np.ndarray
) -> KeptTokens:
    member, place, number = split_key(key)
    return KeptTokens(
        member=member,
        place=place,
        number=number,
        at=depth_T[own_T].astype("<i4").tobytes(),
        advantages=advantage_T[own_T].astype("<f4").tobytes(),
        logprobs=logprob_T[own_T].astype("<f4").tobytes(),
    )
