"""The numbers of one step, over all parts of its batch and all ranks.

Sums stay on the device until the step ends, so a micro-batch never waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import numpy as np
import torch

from rillflow.errors import GraphError
from rillflow.trainer.batches import Rows
from rillflow.trainer.objective import Measured
from rillflow.trainer.parallel.peers import Peers


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
        """Sums and peaks over all ranks, by their names."""
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
        """The fraction of groups whose rewards are all equal; the rows of a group may be on several ranks."""
        there = [float(member in self._varied_G) for member in range(groups)]
        varied = [float(self._varied_G.get(member, False)) for member in range(groups)]
        both = peers.total([*there, *varied])
        seen = sum(count > 0 for count in both[:groups])
        return 1.0 - sum(count > 0 for count in both[groups:]) / seen if seen else 0.0


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """As plain numbers, without what is not finite: nothing downstream can plot or store it."""
    numbers = {name: _number(name, value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if isfinite(number)}


def _number(name: str, value: Any) -> float:
    """Nodes note tensors of one value and numpy's numbers too."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise GraphError(
            f"the metric {name} is no number but {type(value).__name__}", "nodes note one number under each name"
        ) from None
