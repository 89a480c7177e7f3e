"""Rollout nodes, the balance between them and the trainer with the maintainer's decisions, and the weights that they
serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rillflow.clients.sums import sum_nodes
from rillflow.dashboard.charts import Line, Picture
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.dataflow.balance import SATED, STARVING
from rillflow.dataflow.balance_ledger import read_balance
from rillflow.dataflow.ledger.database import Snapshot
from rillflow.dataflow.ledger.nodes import node_info
from rillflow.dataflow.ledger.tables import SUM, Node
from rillflow.errors import RillflowError, RunError
from rillflow.resources.workers import Worker
from rillflow.types import NodeInfo, NodeList
from rillflow.types.base import json_decoder
from rillflow.weights.manifest import HEAD, VersionManifest, folder_name
from rillflow.weights.manifest import Line as VersionLine
from rillflow.weights.sealed import MANIFEST

# ---------------------------------------------------------------- nodes

# The view shows the mean of every measure over the fleet, beside the worst node.


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
    """Return the nodes from the service; if none answers, from the ledgers."""

    def read(reads: Snapshot) -> NodeList:
        rows = reads.all(f"SELECT {Node.columns()} FROM nodes WHERE name != ? ORDER BY name", (SUM,))
        nodes = [Node(*row) for row in rows]
        return NodeList(nodes=[node_info(node, run.now(), node.rate) for node in nodes])

    return live.nodes if live is not None else sum_nodes(run.ledgers(read)).nodes


def known_heads(run: WatchedRun, live: Live | None) -> dict[str, int]:
    """The newest version of each policy."""

    def read(reads: Snapshot) -> dict[str, int]:
        return {row["name"]: row["version"] for row in reads.all("SELECT name, version FROM policies")}

    nothing: dict[str, int] = {}
    return live.status.versions if live is not None else run.ledger(read, nothing)


# ---------------------------------------------------------------- balance


_MOST_LINES = 200


def balance(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    run.curves.follow()
    reports = run.curves.balances
    return {
        "live": live is not None,
        "balance": _balance(run, live),
        "charts": [picture for picture in _pictures(reports) if picture.lines],
        "zones": {"starving": STARVING, "sated": SATED},
        "decisions": run.lines("maintainer.jsonl", _MOST_LINES)[::-1],
        "maintained": bool((run.recipe.get("resources") or {}).get("scaling", {}).get("enabled")),
        "workers": _workers(run),
    }


def _balance(run: WatchedRun, live: Live | None) -> dict[str, Any] | None:
    if live is not None:
        found = live.balance
    else:
        try:
            found = read_balance(run.folder.ledgers, run.first_policy)
        except RunError:  # it has not begun
            return None
    return {"latest": msgspec.to_builtins(found.latest), "current": msgspec.to_builtins(found.current)}


def _pictures(reports: list[dict[str, Any]]) -> list[Picture]:
    """The reports so far, by version."""

    def line(name: str, *path: str) -> list[Line]:
        points = []
        for report in reports:
            value: Any = report
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                points.append((float(report["version"]), float(value)))
        return [Line(name, points)] if points else []

    wait = line("wait fraction", "window", "wait_fraction")
    ratio = line("entered / consumed", "production", "produce_consume_ratio")
    sizes = [*line("GPUs", "production", "gpus"), *line("target", "decision", "target")]
    made = line("samples/s per GPU", "production", "throughput_per_gpu")
    told = [
        (
            "wait",
            "The trainer's wait",
            "the pool is too small above 10 %, and may be too large below 5 %",
            "share",
            wait,
        ),
        ("size", "Size of the pool", "current GPUs, and the target of the rule", "", sizes),
        ("ratio", "Entered per trained sample", "samples that entered a stream for each trained one", "", ratio),
        ("made", "Throughput", "samples per second and GPU", "/s", made),
    ]
    return [Picture(key, title, text, unit, False, lines) for key, title, text, unit, lines in told]


def _workers(run: WatchedRun) -> list[dict[str, Any]]:
    """The run's own workers, with their tags and what they do."""
    try:
        found: list[Worker] = run.folder.workers.read() if run.folder.workers.path.is_file() else []
    except (OSError, RillflowError):
        return []
    return [
        {"name": one.name, "tags": sorted(one.tags), "process": one.process, "rank": one.rank, "lost": one.lost}
        for one in found
    ]


# ---------------------------------------------------------------- weights: published versions, and the nodes' transfers


_MOST_VERSIONS = 40  # of a policy: the latest
_TRANSFERS = ("loads", "delta_loads", "load_seconds", "pause_seconds", "pull_seconds", "pull_bytes")


def weights(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    return {
        "live": live is not None,
        "policies": [_policy(run, policy) for policy in run.policies],
        "transfers": [row for node in known_nodes(run, live) for row in _transfers(run, node)],
        "troubles": [wait for wait in live.status.waits if "weights" in wait or "probe" in wait] if live else [],
    }


def _policy(run: WatchedRun, policy: str) -> dict[str, Any]:
    """The versions that lie in the weight store; older ones have made room."""
    folder = run.folder.weights(policy)
    try:
        line = json_decoder(VersionLine).decode((folder / HEAD).read_bytes())
    except FileNotFoundError:
        return {"policy": policy, "head": None, "versions": [], "orphaned": 0}
    except (OSError, msgspec.MsgspecError) as error:
        return {"policy": policy, "head": None, "versions": [], "orphaned": 0, "unknown": f"head.json: {error}"}
    versions = [
        {
            "version": version,
            "full_bytes": entry.full_bytes,
            "delta_bytes": entry.delta_bytes,
            "delta_of": entry.delta_of,
            **_manifest(folder, version),
        }
        for version, entry in sorted(line.entries.items(), reverse=True)[:_MOST_VERSIONS]
    ]
    return {"policy": policy, "head": line.head, "versions": versions, "orphaned": len(line.orphaned)}


def _manifest(folder: Path, version: int) -> dict[str, Any]:
    """When the version was made, and its probe; nothing where it has been removed meanwhile."""
    try:
        found = json_decoder(VersionManifest).decode((folder / folder_name(version) / MANIFEST).read_bytes())
    except (OSError, msgspec.MsgspecError, RillflowError):
        return {"created": None, "parent": None, "probe": None}
    probe = found.probe
    told = None if probe is None else {"prompts": len(probe.prompts), "tolerance": probe.tolerance}
    return {"created": found.created, "parent": found.parent, "probe": told}


def _transfers(run: WatchedRun, node: NodeInfo) -> list[dict[str, Any]]:
    """Return the downloads of a node for each policy, from its heartbeat."""
    rows = []
    for policy in run.policies:
        if f"{policy}.loads" in node.stats:
            told = {name: node.stats.get(f"{policy}.{name}", 0.0) for name in _TRANSFERS}
            rows.append({"node": node.name, "policy": policy, "version": node.versions.get(policy), **told})
    return rows
