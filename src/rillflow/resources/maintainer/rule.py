"""What a report asks for: the three-zone rule, exactly as `dataflow.balance.decide` has it, on what the pool can make.

The published rule compares what is consumed with what is produced, and was made for pools that produce as fast as they
can. Here admission is capped: a pool that is too large does not overproduce, its nodes stand idle, and the two counts
are equal. What nodes would have made in their idle time is therefore counted as produced (`entered / busy`). Room that
is free tells less surely than samples that nobody took: so by idleness alone a pool shrinks by at most a quarter at
once, and not to a size at which the trainer has starved lately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rillflow.dataflow.balance import STARVING, Branch, Report, decide

MOST_AT_ONCE = 0.25  # of the pool that goes by idleness alone
_LEAST_BUSY = 0.01  # something entered, so somebody was at work, if only between two looks
REMEMBERED = 5  # reports for which a size at which the trainer starved is not gone back to


@dataclass(frozen=True)
class Wish:
    """`target` is in GPUs. `idle`: it follows from idle nodes, not from samples that nobody took."""

    branch: Branch
    target: int
    why: str
    idle: bool = False


def wish(report: Report, busy: float | None) -> Wish:
    """`busy` is the share of the nodes' room that was taken during the report's window, None where nobody looked."""
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
