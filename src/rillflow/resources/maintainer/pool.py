"""The pool as a maintainer sees it: the run's view of its nodes, joined with the executor's.

Every node has exactly one standing. Only `starting` and `here` count: the others are leaving or gone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rillflow.dataflow.balance import NodeReport, Report
from rillflow.resources.maintainer.state import State
from rillflow.types import NodeInfo

# own: the executor's; run: a worker of the run that may be taken away; other: hosted by a trainer, or started by hand
Kind = Literal["own", "run", "other"]
Standing = Literal["starting", "here", "leaving", "gone"]


@dataclass(frozen=True)
class Member:
    """One node. `suspect` as the last report says; `rate` is its mean throughput a GPU over the last reports."""

    name: str
    kind: Kind
    standing: Standing
    gpus: int = 1
    suspect: bool = False
    rate: float | None = None

    @property
    def counts(self) -> bool:
        return self.standing in ("starting", "here")


def members(
    state: State,
    infos: Sequence[NodeInfo],
    report: Report | None,
    workers: Collection[str],
    expected: Collection[str] = (),
) -> list[Member]:
    """Return the members of the pool. `workers` are the run's own nodes that may be taken away; `expected` are those
    that have not joined yet (after the start of a run)."""
    rows = {row.id: row for row in report.nodes} if report else {}
    found = [_member(info, state, rows.get(info.name), workers) for info in infos]
    known = {member.name for member in found}
    for name in state.nodes:
        if name not in known:
            leaving = state.nodes[name].leaving is not None
            found.append(Member(name, "own", "leaving" if leaving else "starting"))
    found += [Member(name, "run", "starting") for name in expected if name not in known]
    return found


def _member(info: NodeInfo, state: State, row: NodeReport | None, workers: Collection[str]) -> Member:
    own = state.nodes.get(info.name)
    kind: Kind = "own" if own else "run" if info.name in workers else "other"
    rates = state.rates.get(info.name)
    return Member(
        info.name,
        kind,
        _standing(info, state),
        gpus=row.gpus if row else 1,
        suspect=row is not None and row.state == "suspect",
        rate=sum(rates) / len(rates) if rates else None,
    )


def _standing(info: NodeInfo, state: State) -> Standing:
    own = state.nodes.get(info.name)
    if info.leaving or (own is not None and own.leaving is not None) or info.name in state.released:
        return "leaving"
    if info.state != "healthy":
        return "gone"
    # A node without weights sends heartbeats but plays nothing yet.
    return "here" if info.versions else "starting"


def size(pool: Sequence[Member]) -> int:
    return sum(member.counts for member in pool)


def nodes_for(gpus: int, pool: Sequence[Member]) -> int:
    """Return how many nodes have at least `gpus` GPUs, if new nodes are like the present ones."""
    here = [member.gpus for member in pool if member.standing == "here"]
    each = sum(here) / len(here) if here else 1.0
    return math.ceil(round(gpus / each, 9))


@dataclass
class Busy:
    """The share of the nodes' capacity that was in use, sampled at even intervals."""

    held: int = 0
    room: int = 0
    looks: int = 0

    def look(self, infos: Sequence[NodeInfo]) -> None:
        playing = [
            i for i in infos if i.state == "healthy" and not i.leaving and i.capacity > 0 and i.active == "rollout"
        ]
        if playing:
            self.held += sum(min(info.held, info.capacity) for info in playing)
            self.room += sum(info.capacity for info in playing)
            self.looks += 1

    def share(self, fewest: int = 2) -> float | None:
        """Return the mean share, or None if there were too few samples."""
        return self.held / self.room if self.looks >= fewest else None


def keep_rates(rates: Mapping[str, list[float]], report: Report, window: int = 3) -> dict[str, list[float]]:
    """Return the throughput in the last `window` reports, including this one, of the nodes that it names."""
    return {
        row.id: [*rates.get(row.id, []), row.throughput_per_gpu][-window:]
        for row in report.nodes
        if row.state != "gone"
    }
