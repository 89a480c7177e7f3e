"""How many tasks a node may hold: fewer when it fails more than others, is slower, or has older weights.

Pure arithmetic over what the ledger has seen of the nodes. Failures and speed are only held against the others': where
all fail, or a node is alone, there is nobody to give its tasks to.

A slow node that is full adds what it can, so as long as there is work for everybody it is left alone. Where there is
not, a task in its hands is one that a quick node lacks:

    a stream without end   it holds its share of all that is under way or waits, by samples a second and in whole groups
                           (one task of it would hold a group up); more only of what the others have no room for
    a set with an end      (on-policy, the last evaluation) it takes what the others would not have finished before it
                           does: nobody waits for the last task of a slow node

So a slow node may get none while others have free hands. Its record fades while it idles, until it is tried again:
nothing else shows that it has recovered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

PROBE_AFTER = 8  # failures in a row, while others succeed, after which a node gets one task at a time
DECAY = 0.95  # of what is remembered at every ending: about the last 20 count
_FEWEST_ENDS = 3.0  # endings before a node's failures say anything
SLOW = 1.5  # times slower than the others' median at which a node counts as slow
_FADING = 8.0  # of its episodes' seconds in which the record of a node that idles fades to a third


@dataclass(frozen=True)
class NodeLook:
    """What is known of a node. `ends` and `bad_ends` are decayed counts, `pace` the seconds of an episode, `speed` the
    samples that it makes in a second for every task that it plays, `idle` the seconds in which it has held none."""

    capacity: int
    ends: float = 0.0
    bad_ends: float = 0.0
    bad_row: int = 0
    pace: float | None = None
    speed: float | None = None
    held: int = 0
    idle: float = 0.0

    @property
    def failing(self) -> float:
        return self.bad_ends / self.ends if self.ends >= _FEWEST_ENDS else 0.0


@dataclass(frozen=True)
class Work:
    """What there is to do: tasks that wait, in groups of `group`. `ends`: nothing more comes before all are done."""

    pending: int
    group: int = 1
    ends: bool = False


@dataclass(frozen=True)
class Allowance:
    """Most tasks that a node may hold at once, and why that is less than its capacity."""

    tasks: int
    why: str = ""


def allowance(node: NodeLook, others: Sequence[NodeLook], work: Work, *, behind: int = 0, bound: int = 0) -> Allowance:
    """`others` are those that could have the tasks instead; `behind` versions of at most `bound` is how old the node's
    weights are."""
    if node.bad_row >= PROBE_AFTER and any(other.bad_row == 0 and other.ends > 0 for other in others):
        return Allowance(1, f"its last {node.bad_row} episodes failed while others' succeed: one at a time")
    trusted, fresh = _reliable(node, others), _fresh(behind, bound)
    tasks = max(1, int(node.capacity * trusted * fresh + 1e-9))
    most = _worthwhile(node, others, work)
    parts = {
        "it fails more often than the others": trusted < 1,
        "it is slower than the others": most is not None and most < tasks,
        "its weights are behind": fresh < 1,
    }
    tasks = tasks if most is None else min(tasks, most)
    why = " and ".join(reason for reason, holds in parts.items() if holds)
    return Allowance(tasks, f"{why}: {tasks} of {node.capacity} tasks" if tasks < node.capacity else "")


def _reliable(node: NodeLook, others: Sequence[NodeLook]) -> float:
    told = [other.failing for other in others if other.ends >= _FEWEST_ENDS]
    return 1.0 - max(0.0, node.failing - median(told)) if told else 1.0


def _fresh(behind: int, bound: int) -> float:
    return 1.0 - min(max(behind, 0), bound) / (bound + 1)


# ---------------------------------------------------------------- speed


def is_slow(node: NodeLook, others: Sequence[NodeLook]) -> bool:
    """Return whether the amount of work matters for the node's allowance."""
    return _seen_slow(node, others) is not None


def _seen_slow(node: NodeLook, others: Sequence[NodeLook]) -> tuple[NodeLook, float] | None:
    """The node, its record faded, and the others' usual speed; None for one that is not slow, or not known to be."""
    quick = [other for other in others if other.pace and other.speed]
    if not node.pace or not node.speed or not quick:
        return None
    usual = median([other.speed or 0.0 for other in quick])
    node = _faded(node, median([other.pace or 0.0 for other in quick]), usual)
    return (node, usual) if (node.speed or 0.0) * SLOW < usual else None


def _worthwhile(node: NodeLook, others: Sequence[NodeLook], work: Work) -> int | None:
    """Most tasks that a slow node should hold."""
    seen = _seen_slow(node, others)
    if seen is None:
        return None
    return _in_time(seen[0], others, work) if work.ends else _share(seen[0], others, work, seen[1])


def _faded(node: NodeLook, pace: float, speed: float) -> NodeLook:
    """The record of an idle node fades."""
    if node.held or not node.pace or not node.speed:
        return node
    kept = math.exp(-max(node.idle, 0.0) / (_FADING * node.pace))
    return replace(node, pace=pace + (node.pace - pace) * kept, speed=speed + (node.speed - speed) * kept)


def _share(node: NodeLook, others: Sequence[NodeLook], work: Work, usual: float) -> int:
    """By samples a second when all are full; a node that has made none yet counts as a usual one."""
    all_of_it = work.pending + node.held + sum(other.held for other in others)
    own = node.capacity * (node.speed or usual)
    theirs = sum(other.capacity * (other.speed or usual) for other in others)
    left_over = all_of_it - sum(other.capacity for other in others)
    share = int(all_of_it * own / (own + theirs) + 1e-9)
    return max(left_over, share - share % work.group)


def _in_time(node: NodeLook, others: Sequence[NodeLook], work: Work) -> int:
    """What it holds, and as many more as the others would not have finished when it has.

    The last of n tasks that wait for the others begins once those before it have, which end at their joint rate, and
    then takes an episode's time.
    """
    quick = [other for other in others if other.pace and other.speed]
    rate = sum(other.capacity / (other.pace or math.inf) for other in quick)
    pace = sum(other.capacity for other in quick) / rate
    free = sum(max(0, other.capacity - other.held) for other in quick)
    # A hair is given away: rounding must not keep the last task from who is exactly as quick.
    return node.held + max(0, math.floor(work.pending - free - rate * ((node.pace or 0.0) - pace) + 1e-9))
