"""The target of a report: the three-zone rule of `dataflow.balance.decide`, applied to what the pool could produce.

The published rule compares consumed with produced samples, for pools that produce as fast as they can. Here admission
is capped: a pool that is too large does not overproduce, its nodes are idle, and the two counts are equal. So the
samples that nodes would have made in their idle time count as produced (`entered / busy`). Idle capacity is weaker
evidence than surplus samples: by idleness alone a pool shrinks by at most a quarter at once, and not to a size at which
the trainer has starved recently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.dataflow.balance import STARVING, Branch, Report, decide
from rillflow.resources.maintainer.pool import Member

MOST_AT_ONCE = 0.25  # of the pool that is retired by idleness alone
_LEAST_BUSY = 0.01  # samples entered, so nodes were at work, if only between two observations
REMEMBERED = 5  # reports for which a size at which the trainer starved is not gone back to


@dataclass(frozen=True)
class Wish:
    """The target in GPUs. `idle` says that it follows from idle nodes, not from surplus samples."""

    branch: Branch
    target: int
    why: str
    idle: bool = False


def wish(report: Report, busy: float | None) -> Wish:
    """Return the target of a report. `busy` is the share of the nodes' capacity in use during its window, or None."""
    plain, made, waiting = report.decision, report.production, report.window.wait_fraction
    share = "is unknown" if waiting is None else f"{waiting:.0%}"
    if plain.branch != "hold" or busy is None or not made.entered:
        return Wish(plain.branch, plain.target, f"{plain.branch}: the trainer's wait {share}, {_flow(report)}")
    could = math.ceil(made.entered / min(max(busy, _LEAST_BUSY), 1.0))
    wanted = decide(made.gpus, waiting, could, made.consumed)
    if wanted.branch == "hold":
        return Wish("hold", made.gpus, f"hold: the trainer's wait {share}, nodes busy {busy:.0%}")
    target = max(wanted.target, made.gpus - max(int(made.gpus * MOST_AT_ONCE), 1))
    return Wish(
        "shrink",
        target,
        f"shrink: the trainer's wait {share}, and nodes were busy {busy:.0%} of the time: "
        f"{wanted.target} GPUs would do",
        idle=True,
    )


def starves(report: Report) -> bool:
    waiting = report.window.wait_fraction
    return waiting is not None and waiting > STARVING


def _flow(report: Report) -> str:
    made = report.production
    return f"{made.entered} samples entered, {made.consumed} consumed"


def victims(pool: Sequence[Member], count: int, spare_gpus: int, *, keep_of_run: int = 1) -> list[Member]:
    """Return at most `count` nodes with at most `spare_gpus` GPUs. `keep_of_run` of the run's own nodes always stay."""
    chosen: list[Member] = []
    run_left = sum(member.kind == "run" and member.counts for member in pool)
    for member in sorted((m for m in pool if m.counts and m.kind != "other"), key=_order):
        if len(chosen) == count:
            break
        if member.gpus > spare_gpus or (member.kind == "run" and run_left <= keep_of_run):
            continue
        chosen.append(member)
        spare_gpus -= member.gpus
        run_left -= member.kind == "run"
    return chosen


def _order(member: Member) -> tuple[bool, bool, float, int, str]:
    """Return the sort key: own nodes first, then suspects, then the slowest. A node without samples is not slow."""
    rate = member.rate if member.rate is not None else float("inf")
    return member.kind != "own", not member.suspect, rate, -_number(member.name), member.name


def _number(name: str) -> int:
    tail = name.rsplit("-", 1)[-1]
    return int(tail) if tail.isdecimal() else -1
