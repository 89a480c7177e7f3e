"""Chooses the nodes to retire when a pool shrinks: suspect nodes first, then persistently slow ones, the newest among
equals.

Only nodes that a maintainer may stop are chosen, its own before the run's. Nodes that have gone do not count. Never
more GPUs are retired than are surplus.
"""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.resources.maintainer.pool import Member


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
