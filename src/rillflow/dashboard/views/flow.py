"""From prompts to trained samples, as counts with causes: where everything went that the run has taken in.

All numbers are running counts of the ledger (`tally`, `share_tally`, `counters`, `nodes`), which the audit compares
with a recount; none needs a pass over its large tables.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rillflow.dashboard.watched import WatchedRun
from rillflow.dataflow.ledger.snapshot import Snapshot

_FAILURES, _ENDS, _RETURNED = "failures.", "ended.", "returned."
_NODE_COUNTS = ("leased", "completed", "failed", "returned", "refused", "produced", "accepted", "consumed", "stale")
_OPEN = {"playing": "being played", "open": "complete, waiting to be trained"}


def flow(run: WatchedRun) -> dict[str, Any]:
    return run.ledger(_flow, {"prompts": None, "evaluation": None, "episodes": None, "samples": None, "streams": []})


def _flow(reads: Snapshot) -> dict[str, Any]:
    counters: dict[str, int] = {row["name"]: row["value"] for row in reads.all("SELECT name, value FROM counters")}
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in reads.all("SELECT lane, state, cause, n FROM tally WHERE n != 0 ORDER BY lane, state, cause"):
        lanes[row["lane"]].append({"state": row["state"], "cause": row["cause"], "count": row["n"]})
    sums = ", ".join(f"sum({name}) AS {name}" for name in (*_NODE_COUNTS, "held"))
    nodes = reads.all(f"SELECT {sums} FROM nodes")[0]
    made = {name: int(nodes[name] or 0) for name in (*_NODE_COUNTS, "held")}
    return {
        "prompts": {
            "taken": counters.get("cursor", 0),
            "skipped": counters.get("skipped", 0),
            "admitted": counters.get("admitted.train", 0),
            "ends": lanes["train"],
            "words": _OPEN,
        },
        "evaluation": {"admitted": counters.get("admitted.eval", 0), "ends": lanes["eval"]},
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
            "entered": counters.get("samples.entered", 0),
            "consumed": made["consumed"],
            "stale": made["stale"],
        },
        "streams": _streams(reads),
        "rolled_back": counters.get("rolled_back", 0),
        "quarantined": counters.get("quarantined", 0),
    }


def _streams(reads: Snapshot) -> list[dict[str, Any]]:
    """Return the groups of each policy's stream by state and cause."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in reads.all("SELECT stream, state, cause, n FROM share_tally WHERE n != 0 ORDER BY stream, state, cause"):
        found[row["stream"]].append({"state": row["state"], "cause": row["cause"], "count": row["n"]})
    return [{"policy": policy, "ends": ends} for policy, ends in found.items()]


def _named(counters: dict[str, int], prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix) and n}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
