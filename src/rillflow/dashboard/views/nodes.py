"""Rollout nodes: each of them, and of every measure the mean of the fleet beside the worst node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.dataflow.ledger.nodes import node_info
from rillflow.dataflow.ledger.snapshot import Snapshot
from rillflow.dataflow.ledger.tables import SUM, Node
from rillflow.types import NodeInfo

_MOST = 500  # rows that the table shows: the worst first


def nodes(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    """Return the nodes of a live run from its service, those of another run from its ledger."""
    heads = known_heads(run, live)
    rows = sorted(
        (_row(node, heads) for node in known_nodes(run, live)), key=lambda row: (-row["trouble"], row["name"])
    )
    return {
        "live": live is not None,
        "nodes": rows[:_MOST],
        "left_out": max(len(rows) - _MOST, 0),
        # How nodes were left when the run ended says nothing of them.
        "fleet": fleet(
            [row for row in rows if (row["state"] == "healthy" if live else row["completed"] + row["failed"])]
        ),
        "notes": dict(live.status.notes) if live else {},
    }


def _row(node: NodeInfo, heads: dict[str, int]) -> dict[str, Any]:
    ends = node.completed + node.failed
    behind = [heads[policy] - version for policy, version in node.versions.items() if policy in heads]
    failed = node.failed / ends if ends else 0.0
    return {
        "name": node.name,
        "state": node.state,
        "active": node.active,
        "leaving": node.leaving,
        "seen": node.seen,
        "held": node.held,
        "capacity": node.capacity,
        "busy": node.held / node.capacity if node.capacity else None,
        "completed": node.completed,
        "failed": node.failed,
        "failed_share": failed,
        "pace": node.pace,
        "throughput": node.throughput,
        "behind": max(behind, default=None),
        "versions": node.versions,
        "stats": node.stats,
        "trouble": (node.state != "healthy") + (failed > 0.5) + bool(behind and max(behind) > 2),
    }


_MEASURES: Sequence[tuple[str, str, str, Callable[[Sequence[float]], float]]] = (
    ("throughput", "samples per second", "/s", min),
    ("pace", "seconds per episode", "s", max),
    ("failed_share", "failed episodes", "share", max),
    ("busy", "capacity in use", "share", min),
    ("behind", "versions behind", "", max),
)


def fleet(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each measure: its mean, and the worst value with the node that has it."""
    found = []
    for key, title, unit, worst in _MEASURES:
        told = [(row[key], row["name"]) for row in rows if row[key] is not None]
        if told:
            values = [value for value, _ in told]
            least = worst(values)
            name = next(name for value, name in told if value == least)
            mean = sum(values) / len(values)
            found.append({"key": key, "title": title, "unit": unit, "mean": mean, "worst": least, "node": name})
    return found


# ---------------------------------------------------------------- without a live service


def known_nodes(run: WatchedRun, live: Live | None) -> list[NodeInfo]:
    """Return the nodes from the service; if none answers, from the ledger."""

    def read(reads: Snapshot) -> list[NodeInfo]:
        rows = reads.all(f"SELECT {Node.columns()} FROM nodes WHERE name != ? ORDER BY name", (SUM,))
        nodes = [Node(*row) for row in rows]
        return [node_info(node, run.now(), node.rate) for node in nodes]

    nothing: list[NodeInfo] = []
    return live.nodes if live is not None else run.ledger(read, nothing)


def known_heads(run: WatchedRun, live: Live | None) -> dict[str, int]:
    """The newest version of each policy."""

    def read(reads: Snapshot) -> dict[str, int]:
        return {row["name"]: row["version"] for row in reads.all("SELECT name, version FROM policies")}

    nothing: dict[str, int] = {}
    return live.status.versions if live is not None else run.ledger(read, nothing)
