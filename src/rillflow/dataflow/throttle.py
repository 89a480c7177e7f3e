"""How many tasks a node may hold: fewer when it fails more than others, is slower, or has older weights.

Pure arithmetic over what the ledger has seen of the nodes. A healthy node always gets one task, as a probe: nothing
else shows that it has recovered. Failures and pace are only held against the others': where all fail, or a node is
alone, there is nobody to give its tasks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PROBE_AFTER = 8  # failures in a row, while others succeed, after which a node gets one task at a time
DECAY = 0.95  # of what is remembered at every ending: about the last 20 count
_FEWEST_ENDS = 3.0  # endings before a node's failures say anything
_SLOW = 1.5  # times the others' median at which a node counts as slow
_LEAST = 0.25  # of its capacity that a slow node keeps


@dataclass(frozen=True)
class NodeLook:
    """What is known of a node. `ends` and `bad_ends` are decayed counts, `pace` the seconds of an episode."""

    capacity: int
    ends: float = 0.0
    bad_ends: float = 0.0
    bad_row: int = 0
    pace: float | None = None

    @property
    def failing(self) -> float:
        return self.bad_ends / self.ends if self.ends >= _FEWEST_ENDS else 0.0


@dataclass(frozen=True)
class Allowance:
    """Most tasks that a node may hold at once, and why that is less than its capacity."""

    tasks: int
    why: str = ""


def allowance(node: NodeLook, others: Sequence[NodeLook], *, behind: int = 0, bound: int = 0) -> Allowance:
    """`behind` versions of at most `bound` is how old the node's weights are."""
    if node.bad_row >= PROBE_AFTER and any(other.bad_row == 0 and other.ends > 0 for other in others):
        return Allowance(1, f"its last {node.bad_row} episodes failed while others' succeed: one at a time")
    parts = {
        "it fails more often than the others": _reliable(node, others),
        "it is slower than the others": _quick(node, others),
        "its weights are behind": _fresh(behind, bound),
    }
    share = 1.0
    for part in parts.values():
        share *= part
    tasks = max(1, int(node.capacity * share + 1e-9))
    why = " and ".join(reason for reason, part in parts.items() if part < 1)
    return Allowance(tasks, f"{why}: {tasks} of {node.capacity} tasks" if tasks < node.capacity else "")


def _reliable(node: NodeLook, others: Sequence[NodeLook]) -> float:
    told = [other.failing for other in others if other.ends >= _FEWEST_ENDS]
    return 1.0 - max(0.0, node.failing - median(told)) if told else 1.0


def _quick(node: NodeLook, others: Sequence[NodeLook]) -> float:
    told = [other.pace for other in others if other.pace]
    if not told or not node.pace or node.pace <= _SLOW * median(told):
        return 1.0
    return max(_LEAST, median(told) / node.pace)


def _fresh(behind: int, bound: int) -> float:
    return 1.0 - min(max(behind, 0), bound) / (bound + 1)
