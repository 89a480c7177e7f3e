"""From prompts to trained samples, as counts with causes: where everything went that the run has taken in.

All numbers are running counts of the ledgers (`tally`, `share_tally`, `counters`, `nodes`), which the audit compares
with a recount; none needs a pass over their large tables.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rillflow.dashboard.watched import WatchedRun
from rillflow.dataflow.ledger.snapshot import Snapshot
from rillflow.dataflow.ledger.streams import ELSEWHERE

_FAILURES, _ENDS, _RETURNED = "failures.", "ended.", "returned."
_NODE_COUNTS = ("leased", "completed", "failed", "returned", "refused", "produced", "accepted", "consumed", "stale")
_OPEN = {"playing": "being played", "open": "complete, waiting to be trained"}


@dataclass
class _Counts:
    """The running counts of one ledger, or of several together."""

    counters: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by lane, state and cause
    shares: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by stream, state and cause
    nodes: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Counts) -> None:
        self.counters.update(other.counters)
        self.groups.update(other.groups)
        self.shares.update(other.shares)
        self.nodes.update(other.nodes)


def flow(run: WatchedRun) -> dict[str, Any]:
    """Return the counts of all ledgers of the run together."""
    found = run.ledgers(_read)
    if not found:
        return {"prompts": None, "evaluation": None, "episodes": None, "samples": None, "streams": []}
    whole = _Counts()
    for counts in found:
        whole.add(counts)
    return _flow(whole)


def _read(reads: Snapshot) -> _Counts:
    sums = ", ".join(f"sum({name}) AS {name}" for name in (*_NODE_COUNTS, "held"))
    nodes = reads.all(f"SELECT {sums} FROM nodes")[0]
    tally, shares = "lane, state, cause, n FROM tally", "stream, state, cause, n FROM share_tally"
    return _Counts(
        Counter({name: value for name, value in reads.all("SELECT name, value FROM counters")}),
        Counter({(lane, state, cause): n for lane, state, cause, n in reads.all(f"SELECT {tally} WHERE n != 0")}),
        Counter({(stream, state, cause): n for stream, state, cause, n in reads.all(f"SELECT {shares} WHERE n != 0")}),
        Counter({name: int(nodes[name] or 0) for name in (*_NODE_COUNTS, "held")}),
    )


def _flow(counts: _Counts) -> dict[str, Any]:
    counters, made, lanes = counts.counters, counts.nodes, _ends(counts.groups)
    return {
        "prompts": {
            "taken": counters["cursor"] - counters[ELSEWHERE],
            "skipped": counters["skipped"],
            "admitted": counters["admitted.train"],
            "ends": lanes.get("train", []),
            "words": _OPEN,
        },
        "evaluation": {"admitted": counters["admitted.eval"], "ends": lanes.get("eval", [])},
        "episodes": {
            "leased": made["leased"],
            "completed": made["completed"],
            "failed": made["failed"],
            "failures": _named(counters, _FAILURES),
            "returned": made["returned"],
            "returned_by": _named(counters, _RETURNED),
            "refused": made["refused"],
            "held": made["held"],
            "rewarded_ends": _named(counters, _ENDS),
        },
        "samples": {
            "produced": made["produced"],
            "accepted": made["accepted"],
            "entered": counters["samples.entered"],
            "consumed": made["consumed"],
            "stale": made["stale"],
        },
        "streams": [{"policy": policy, "ends": ends} for policy, ends in _ends(counts.shares).items()],
        "rolled_back": counters["rolled_back"],
        "quarantined": counters["quarantined"],
    }


def _ends(counted: Counter[tuple[str, str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Return the counts of each lane or stream by state and cause."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (first, state, cause), number in sorted(counted.items()):
        found[first].append({"state": state, "cause": cause, "count": number})
    return found


def _named(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix) and n}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
